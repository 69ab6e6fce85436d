"""What the coordinator's program tells of an optimizer's settings while functions wait: each has those of its time."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

Groups = Sequence[Mapping[str, Any]]


class ToldSettings:
    """The settings of one optimizer, as far as they were told, by the first function that they are for.

    Functions are numbered in the order in which they are scheduled, so the number of a gradient's function says with
    which settings it is applied.
    """

    def __init__(self) -> None:
        self._since = [0]
        self._groups: list[list[dict[str, Any]]] = [[]]
        self._keys: set[tuple[int, str]] = set()
        self._now = -1

    def tell(self, groups: Groups, before: Groups | None, since: int, low_water: int) -> None:
        """New settings.

        Args:
            groups: what is new in each group.
            before: what was there in its place; ``None``: no function is to have that any more.
            since: number of the first function that they are for.
            low_water: all functions with smaller numbers are finished.
        """
        latest = self._groups[-1] or [{} for _ in groups]
        newest = [{**old, **new} for old, new in zip(latest, groups, strict=True)]
        if before is None:
            since, self._since, self._groups = 0, [], []
        finished = max(bisect.bisect_right(self._since, low_water) - 1, 0)
        del self._since[:finished], self._groups[:finished]
        new_keys = {(index, key) for index, group in enumerate(groups) for key in group} - self._keys
        for index, key in new_keys:
            for position, entry in enumerate(self._groups):
                self._groups[position] = entry = entry or [{} for _ in groups]
                if before is not None and key in before[index]:
                    entry[index].setdefault(key, before[index][key])
        self._keys |= new_keys
        if self._since and since <= self._since[-1]:
            self._groups[-1] = newest
        else:
            self._since.append(since)
            self._groups.append(newest)
        self._now = -1

    def switch(self, function: int) -> Groups | None:
        """The settings for a function, if they are others than those of the last one; 0: the newest."""
        index = (bisect.bisect_right(self._since, function) if function else len(self._since)) - 1
        if index == self._now:
            return None
        self._now = index
        return self._groups[max(index, 0)]

    def state(self) -> dict[str, Any]:
        """For snapshots."""
        return {"since": list(self._since), "groups": [[dict(group) for group in entry] for entry in self._groups]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> ToldSettings:
        """What ``state`` gave."""
        made = cls()
        made._since, made._groups = list(state["since"]), list(state["groups"])
        made._keys = {(i, key) for entry in made._groups for i, group in enumerate(entry) for key in group}
        return made
