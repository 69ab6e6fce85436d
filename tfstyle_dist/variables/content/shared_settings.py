"""What all replicas of a process share and a step may change: settings of optimizers, and of modules.

Central storage has one optimizer for all, whose groups' settings are each replica's own while it has the turn
(``GroupSettings``). In every strategy modules may have settings of the program, numpy arrays and iterators, in which a
step may count: a warning says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.variables.central.group_settings import GroupSettings
from tfstyle_dist.variables.content.iterators import Position
from tfstyle_dist.variables.content.module_settings import Elements, ModuleSettings, Place


class SharedSettings:
    """The parameter groups of some optimizers, and the settings of modules.

    Args:
        count: of the replicas.

    Attributes:
        of_groups: of the optimizers that all replicas share.
        iterators: that the step function of the next run names.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.iterators: Sequence[Any] = ()
        self.of_groups = GroupSettings(count)
        self._of_modules = ModuleSettings()
        self._runs = 0
        self._known: dict[Place, Any] = {}  # of modules
        self._calls: dict[int, int] = {}  # of each replica: how many calls it has made that all make
        self._changed: dict[tuple[Place, int], int] = {}  # by which replica, between which calls
        self._elements: dict[tuple[Place, int], set[int]] = {}  # of arrays: which were

    def begin(self, things: list[tuple[Any, Any]], own: Mapping[int, Any]) -> None:
        """A run begins: nobody has changed anything in it. What takes time is looked at in runs 1, 2, 4, 8 and so on.

        Args:
            things: the objects whose attributes are content, each with its content.
            own: see ``ModuleSettings.find``.
        """
        self._runs += 1
        looks = not self._runs & (self._runs - 1)
        self.of_groups.begin(looks)
        self._of_modules.iterators, self.iterators = self.iterators if looks else (), ()
        self._of_modules.kinds = ()
        if looks:
            self._of_modules.find(things, own)
        self._calls.clear()
        self._changed.clear()
        self._elements.clear()

    def note(self, replica: int | None) -> None:
        """What is set now is not what the replica whose turn begins has done; ``None``: cross-replica context's."""
        if self.of_groups:
            self.of_groups.note(replica, 0 if replica is None else self._calls.get(replica, 0) + 1)
        if self._of_modules:
            self._known = self._of_modules.now()

    def fail(self) -> None:
        """A run failed; see ``GroupSettings``."""
        self.of_groups.fail(max(self._calls.values(), default=0))

    def compare(self, replica: int) -> None:
        """A replica comes to a call that all make, or to its end.

        Args:
            replica: local number.

        Raises:
            RuntimeError: it has given a setting of an optimizer another value than a replica before it.
        """
        call = self._calls[replica] = self._calls.get(replica, 0) + 1
        if self._of_modules:
            before, self._known = self._known, self._of_modules.now()
            for place in self._known.keys() & before.keys():  # a replica may make settings of its own
                self._compare((place, call), replica, before[place], self._known[place])
        if self.of_groups:
            last = all(self._calls.get(other, 0) >= call for other in range(self._count))
            self.of_groups.compare(replica, call, last)

    def _compare(self, key: tuple[Place, int], replica: int, was: Any, now: Any) -> None:
        if was == now:
            return
        first = self._changed.setdefault(key, replica)
        if not self._are_others(key, was, now) and first != replica:
            _say_counted(key[0][1], key[0][2], first, replica, now)

    def _are_others(self, key: tuple[Place, int], was: Any, now: Any) -> bool:
        """Whether a replica has written to elements of an array that no other one has written to; remembers them."""
        if not (isinstance(was, Elements) and isinstance(now, Elements)):
            return False
        known, changed = self._elements.setdefault(key, set()), was.changed(now)
        apart = known.isdisjoint(changed)
        known |= changed
        return apart


def _say_counted(settings: int | str, name: str, first: int, then: int, now: Any) -> None:
    of = f"attribute {name!r} of {settings}" if name else f"({settings}) that the step names"
    common = (
        "what a step makes of the value that it finds, as in *= 0.99 or += 1, is done once for each replica, and of "
        "values of their own the last one stays."
    )
    if isinstance(now, Elements):
        what = f"The numpy array {of}"
        why = (
            f"The replicas of one process share it: {common} That does no harm where each step writes the elements "
            "before it reads them. Else keep them in a tensor (register_buffer), set a new array, as in "
            f"self.{name} = self.{name} + 1"
        )
    elif isinstance(now, Position):
        what = f"The iterator {of}"
        why = (
            "The replicas of one process share it: what one takes the next one does not find. That is right where the "
            "replicas divide what comes from it. Else take the values outside of the step and give them to it as "
            "arguments, or count in a number, as self.calls += 1, and derive the value from it"
        )
    else:
        what = f"The setting {name!r} in {settings}"
        why = (
            f"The replicas of one process share the settings of a program: {common} Keep such a number in an attribute "
            "of the module itself, of which each replica has its own"
        )
    warn_once(
        f"setting {settings} {name}",
        f"{what} was changed by replica {first} and then by replica {then} in one call of strategy.run. {why}, or "
        "change it after strategy.run(...). See docs/replicas.md.",
    )
