"""The settings in an optimizer's parameter groups where all replicas have one optimizer: central storage.

A step that changes them, as a learning rate scheduler does, changes them once: between two calls that all make, each
replica finds the values of the first of these calls, whatever another replica has made of them meanwhile, and all must
come to the same ones. So a scheduler, of which each replica has its own counters, steps as it does on one device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.variables.central.known_values import GONE, PLAIN, Value, mark_of
from tfstyle_dist.variables.central.state_writes import StateWrites

Place = tuple[int, int, str]
"""An optimizer by its ``id``, the number of a group, and the name of a setting."""
_PARAMETERS = "params"
_NO_SETTINGS = "param_names"
_ALL_GROUPS = -1, "number"
_ONE_OPTIMIZER = (
    "Under central storage there is one optimizer for all replicas: the others find its parameters, and its state, as "
    "they are then. Do it after strategy.run(...), or use MirroredStrategy, where each replica has its own."
)


@dataclass(slots=True)
class _Change:
    """What a replica has made of a setting between two calls that all make.

    Attributes:
        replica: local number.
        replicas: all that have made it.
        before, after: its values.
        lendable: whether another replica can have the value before.
    """

    replica: int
    replicas: set[int]
    before: Value
    after: Value
    lendable: bool


class GroupSettings:
    """The settings of some optimizers during runs.

    Args:
        count: of the replicas.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self._found: dict[Place, Any] = {}  # by the replica whose turn it is
        self._marks: dict[Place, Any] = {}  # of those that may be written to in place
        self._inside: dict[Place, torch.Tensor] = {}  # of tensors: their values
        self._changes: dict[tuple[Place, int], _Change] = {}  # between which calls
        self._lent: dict[Place, _Change] = {}  # those that have their old values again for a replica
        self._made_in_steps: set[int] = set()  # optimizers that a replica has for itself
        self._alone: list[Callable[[], None]] = []  # say what one replica alone has changed
        self._state = StateWrites()

    def __bool__(self) -> bool:
        return bool(self._optimizers)

    def add(self, optimizer: Any, in_step: bool) -> None:
        """Looks at an optimizer from now on; ``in_step``: it is found while a replica has the turn."""
        number = id(optimizer)
        if number not in self._optimizers:
            if in_step:
                self._made_in_steps.add(number)
            self._optimizers[number] = weakref.ref(optimizer, lambda _: self._forget(number))
            self._remember(_settings(number, optimizer))

    def begin(self, looks: bool) -> None:
        """A run begins: nobody has changed anything in it; ``looks``: it is one in which the state is looked at."""
        self._changes.clear()
        self._state.begin(looks)

    def note(self, replica: int | None, call: int) -> None:
        """The turn passes; what is set now is not what the replica whose turn begins has done.

        Args:
            replica: which finds what it would find alone; ``None``: cross-replica context, which sees what was done.
            call: how many calls that all make it will have made when its turn ends.
        """
        self._settle()
        for (place, number), change in self._changes.items():
            if number == call and change.replica != replica and replica is not None and change.lendable:
                self._put(place, change.before)
                self._lent[place] = change
        self._remember_all()
        self._state.note(self._all())

    def compare(self, replica: int, call: int, last: bool) -> None:
        """A replica comes to a call that all make, or to its end.

        Args:
            replica: local number.
            call: how many such calls it has made now.
            last: whether all others have made as many.

        Raises:
            RuntimeError: it has given a setting another value than a replica before it.
        """
        now, lent = self._now(), self._lent
        for place in self._changed(now):
            after = Value.of(now.get(place, GONE))
            change = self._changes.get((place, call))
            if change is None:
                before, in_group = self._before(place), (*place[:2], _PARAMETERS) in self._found
                lendable = in_group and before.may_be_put_back and after.may_be_put_back
                self._changes[place, call] = _Change(replica, {replica}, before, after, lendable)
            elif change.replica == replica:
                change.after = after
            elif place not in lent or not after.is_as(change.after):
                raise RuntimeError(self._said(place, change, replica, after, place in lent))
            else:
                change.replicas.add(replica)
        self._settle()
        self._remember_all()
        self._state.compare(replica, call, self._all())
        if last:
            for (place, number), change in self._changes.items():
                known = place[0] not in self._made_in_steps and change.lendable  # else the others found what was made
                if known and number == call and len(change.replicas) < self._count:
                    kind = type(self._optimizer(place[0])).__name__
                    self._alone.append(partial(_say_alone, kind, place, change.replica))

    def end(self) -> None:
        """A run ends well, or is at a call that all make."""
        for say in self._alone:
            say()
        self._alone.clear()

    def fail(self, last: int) -> None:
        """A run failed: what others than the first replica made of settings before its end is as it was.

        Args:
            last: how many calls that all make it had, its end among them.
        """
        self._alone.clear()
        for (place, call), change in self._changes.items():
            if call == last and 0 not in change.replicas and change.lendable:
                self._put(place, change.before)

    def explain(self, error: BaseException) -> None:
        """A run failed: adds to the error which replica gave an optimizer other parameters before, if one did."""
        for ((number, group, name), _), change in self._changes.items():
            optimizer = self._optimizer(number)
            if name == _PARAMETERS and optimizer is not None and _ONE_OPTIMIZER not in str(error):
                error.add_note(
                    f"[tfstyle_dist] in this call of strategy.run replica {change.replica} gave "
                    f"{type(optimizer).__name__}.param_groups[{group}] other parameters. {_ONE_OPTIMIZER}"
                )

    def _forget(self, number: int) -> None:
        """An optimizer is gone; another one may get its ``id`` in the same step."""
        self._optimizers.pop(number, None)
        self._made_in_steps.discard(number)
        self._found = {place: value for place, value in self._found.items() if place[0] != number}
        self._changes = {key: change for key, change in self._changes.items() if key[0][0] != number}
        self._lent = {place: change for place, change in self._lent.items() if place[0] != number}
        self._state.forget(number)

    def _settle(self) -> None:
        """What was lent has its last values again."""
        lent, self._lent = self._lent, {}
        for place, change in lent.items():
            self._put(place, change.after)

    def _put(self, place: Place, known: Value) -> None:
        number, group, name = place
        groups = getattr(self._optimizer(number), "param_groups", ())
        if group >= len(groups):
            return
        if known.value is GONE:
            groups[group].pop(name, None)
            return
        if known.inside is not None:
            known.value.detach().copy_(known.inside)
        groups[group][name] = known.value

    def _remember_all(self) -> None:
        self._found, self._marks, self._inside = {}, {}, {}
        self._remember(self._now())

    def _remember(self, values: dict[Place, Any]) -> None:
        others = {place: value for place, value in values.items() if not isinstance(value, PLAIN)}
        self._found |= values
        self._marks |= {place: _mark_at(place, value) for place, value in others.items()}
        self._inside |= {p: v.detach().clone() for p, v in others.items() if isinstance(v, torch.Tensor)}

    def _before(self, place: Place) -> Value:
        return Value(self._found.get(place, GONE), self._inside.get(place))

    def _changed(self, now: dict[Place, Any]) -> list[Place]:
        found, marks = self._found, self._marks
        gone = [place for place in found if place not in now]
        others = [p for p, value in now.items() if p in marks or value is not found.get(p, GONE)]
        known = {p: marks[p] if p in marks else mark_of(found.get(p, GONE)) for p in others}
        written = gone + [p for p in others if known[p] != _mark_at(p, now[p])]
        return sorted(written, key=lambda place: place[1:] != _ALL_GROUPS)  # where groups go, others move up

    def _now(self) -> dict[Place, Any]:
        found: dict[Place, Any] = {}
        for optimizer in self._all():
            found |= _settings(id(optimizer), optimizer)
        return found

    def _all(self) -> list[Any]:
        return [known for reference in list(self._optimizers.values()) if (known := reference()) is not None]

    def _optimizer(self, number: int) -> Any:
        reference = self._optimizers.get(number)
        return None if reference is None else reference()

    def _said(self, place: Place, change: _Change, then: int, after: Value, lent: bool) -> str:
        number, group, name = place
        setting = f"{type(self._optimizer(number)).__name__}.param_groups[{group}]"
        if place[1:] == _ALL_GROUPS:
            return (
                f"The parameter groups of {type(self._optimizer(number)).__name__} were {change.before}, then "
                f"{change.after} by replica {change.replica}, and {after} by replica {then}, in one call of "
                f"strategy.run: groups are removed and added once for each replica. {_ONE_OPTIMIZER}"
            )
        if name == _PARAMETERS:
            return (
                f"The parameters of {setting} were exchanged by replica {change.replica} and then by replica {then} in "
                f"one call of strategy.run. {_ONE_OPTIMIZER}"
            )
        if lent:
            return (
                f"{setting}[{name!r}] became {change.after} in replica {change.replica} and {after} in replica {then}, "
                "in one call of strategy.run. Under central storage there is one optimizer for all replicas, so its "
                "settings must be the same in all. Make them of what is the same in all replicas, such as a loss that "
                "get_replica_context().all_reduce('MEAN', loss) gave, or change them after strategy.run(...)."
            )
        return (
            f"{setting}[{name!r}] was changed by replica {change.replica} and then by replica {then} in one call of "
            "strategy.run. Under central storage there is one optimizer for all replicas, and a setting that is no "
            "number, text, tensor or tuple of these is changed once for each of them. Change it after "
            "strategy.run(...), or in merge_call."
        )


def _say_alone(kind: str, place: Place, replica: int) -> None:
    _, group, name = place
    warn_once(
        f"a setting of one replica alone {kind} {name}",
        f"{name!r} of group {group} in {kind}.param_groups was changed by replica {replica} in strategy.run, and not "
        "by all replicas. Under central storage there is one optimizer for all, so it counts for all from their next "
        "call on that all make. Let all replicas make it the same, or change it after strategy.run(...).",
    )


def _settings(number: int, optimizer: Any) -> dict[Place, Any]:
    groups = getattr(optimizer, "param_groups", ())  # a wrapper may have none
    return {(number, *_ALL_GROUPS): len(groups)} | {
        (number, place, name): value
        for place, group in enumerate(groups)
        for name, value in group.items()
        if name != _NO_SETTINGS
    }


def _mark_at(place: Place, value: Any) -> Any:
    return tuple(map(id, value)) if place[2] == _PARAMETERS else mark_of(value)
