"""Notices when several replicas change settings that they share.

Central storage has one optimizer for all: a learning rate scheduler of whatever library, called in the step function,
would advance it once for each replica, which is refused. In every strategy modules may have settings of the program,
numpy arrays and iterators, in which a step may count: a warning says so. A step function that gives a setting a value
of its own changes it once, by the first replica: the others find it so.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.variables.module_settings import Elements, ModuleSettings, Place, Position

_GONE = object()
_PARAMETERS = "params"
_ONE_OPTIMIZER = (
    "Under central storage there is one optimizer for all replicas: the others find its parameters, and its state, as "
    "they are then. Do it after strategy.run(...), or use MirroredStrategy, where each replica has its own."
)


class SharedSettings:
    """The parameter groups of some optimizers, and the settings of modules."""

    def __init__(self) -> None:
        self._of_modules = ModuleSettings()
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self._known: dict[Place, Any] = {}
        self._calls: dict[int, int] = {}  # of each replica: how many calls it has made that all make
        self._changed: dict[tuple[Place, int], int] = {}  # by which replica, between which calls
        self._elements: dict[tuple[Place, int], set[int]] = {}  # of arrays: which were

    def add(self, optimizer: Any) -> None:
        """Looks at an optimizer from now on."""
        number = id(optimizer)
        if number not in self._optimizers:
            self._optimizers[number] = weakref.ref(optimizer, lambda _: self._forget(number))
            self._known |= _settings(number, optimizer)

    def begin(self, things: list[tuple[Any, Any]]) -> None:
        """A run begins: nobody has changed anything in it.

        Args:
            things: the objects whose attributes are content, each with its content.
        """
        self._of_modules.begin(things)
        self._calls.clear()
        self._changed.clear()
        self._elements.clear()

    def note(self) -> None:
        """What is set now is not what the replica whose turn begins has done."""
        if self._optimizers or self._of_modules:
            self._known = self._now()

    def compare(self, replica: int) -> None:
        """A replica comes to a call that all make, or to its end.

        Args:
            replica: local number.

        Raises:
            RuntimeError: it has changed a setting of an optimizer that another replica has changed between the same
                two calls.
        """
        if not (self._optimizers or self._of_modules):
            return
        call = self._calls[replica] = self._calls.get(replica, 0) + 1
        before, self._known = self._known, self._now()
        for place in self._known.keys() | before.keys():
            was, now = before.get(place, _GONE), self._known.get(place, _GONE)
            of_module = isinstance(place[1], str)
            if was == now or (of_module and (was is _GONE or now is _GONE)):  # a replica may make settings of its own
                continue
            first = self._changed.setdefault((place, call), replica)
            if self._are_others((place, call), was, now):
                continue
            if first != replica and of_module:
                _say_counted(place[1], place[2], first, replica, now)
            elif first != replica:
                raise RuntimeError(self._said(place, first, replica))

    def _are_others(self, key: tuple[Place, int], was: Any, now: Any) -> bool:
        """Whether a replica has written to elements of an array that no other one has written to; remembers them."""
        if not (isinstance(was, Elements) and isinstance(now, Elements)):
            return False
        known, changed = self._elements.setdefault(key, set()), was.changed(now)
        apart = known.isdisjoint(changed)
        known |= changed
        return apart

    def explain(self, error: BaseException) -> None:
        """A run failed: adds to the error which replica gave an optimizer other parameters before, if one did."""
        for ((number, group, name), _), replica in self._changed.items():
            reference = self._optimizers.get(number)
            optimizer = None if reference is None else reference()
            if name == _PARAMETERS and optimizer is not None and _ONE_OPTIMIZER not in str(error):
                error.add_note(
                    f"[tfstyle_dist] in this call of strategy.run replica {replica} gave {type(optimizer).__name__}."
                    f"param_groups[{group}] other parameters. {_ONE_OPTIMIZER}"
                )

    def _said(self, place: Place, first: int, then: int) -> str:
        number, group, name = place
        optimizer = self._optimizers[number]()
        if name == _PARAMETERS:
            return (
                f"The parameters of {type(optimizer).__name__}.param_groups[{group}] were exchanged by replica {first} "
                f"and then by replica {then} in one call of strategy.run. {_ONE_OPTIMIZER}"
            )
        return (
            f"{type(optimizer).__name__}.param_groups[{group}][{name!r}] was changed by replica {first} and then by "
            f"replica {then} in one call of strategy.run. Under central storage there is one optimizer for all "
            "replicas, so what each of them makes of the value that it finds, as the step() of a scheduler or "
            f"group[{name!r}] *= 0.9 does, is done once per replica. Do it after strategy.run(...), or in merge_call; "
            "a value that does not depend on the one before may be set in the step by all replicas."
        )

    def _now(self) -> dict[Place, Any]:
        found: dict[Place, Any] = dict(self._of_modules.now())
        for number, reference in list(self._optimizers.items()):
            optimizer = reference()
            if optimizer is not None:
                found |= _settings(number, optimizer)
        return found

    def _forget(self, number: int) -> None:
        self._optimizers.pop(number, None)
        self._known = {place: value for place, value in self._known.items() if place[0] != number}


def _settings(number: int, optimizer: Any) -> dict[Place, Any]:
    groups = getattr(optimizer, "param_groups", ())  # a wrapper may have none
    return {
        (number, place, name): tuple(map(id, value)) if name == _PARAMETERS else _mark(value)
        for place, group in enumerate(groups)
        for name, value in group.items()
        if name != "param_names"
    }


def _say_counted(settings: int | str, name: str, first: int, then: int, now: Any) -> None:
    if isinstance(now, Elements):
        what, of = "numpy array", f"attribute {name!r} of {settings}"
        instead = (
            "That does no harm where each step writes the elements before it reads them. Else keep them in a tensor "
            f"(register_buffer), set a new array, as in self.{name} = self.{name} + 1"
        )
    elif isinstance(now, Position):
        what, of = "iterator", f"attribute {name!r} of {settings}"
        instead = "Count in a number, as self.calls += 1, and derive the value from it"
    else:
        what, of = "setting", f"{name!r} in {settings}"
        instead = "Keep such a number in an attribute of the module itself, of which each replica has its own"
    warn_once(
        f"setting {settings} {name}",
        f"The {what} {of} was changed by replica {first} and then by replica {then} in one call of strategy.run. The "
        "replicas of one process share the settings, arrays and iterators of a program: what a step makes of the value "
        "that it finds, as in *= 0.99 or += 1, is done once for each replica, and of values of their own the last one "
        f"stays. {instead}, or change it after strategy.run(...). See docs/replicas.md.",
    )


def _mark(value: Any) -> Any:
    """Something that changes when the value does; equal to itself, as NaN is not."""
    if isinstance(value, torch.Tensor):
        return id(value), torch_internals.version_of(value)
    if isinstance(value, int | float | str | type(None)):
        return repr(value)
    if isinstance(value, tuple | list):
        return tuple(map(_mark, value))
    return id(value)
