"""The steps of one function, noted as they come and added up a few at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Final

from tfstyle_dist.runtime.clocks import PHASES

RECENT: Final = 512
"""So many steps of each function are kept one by one, for medians and the plot."""
_ADDED_TOGETHER = 64
_Noted = tuple[list[float], list[list[float]]]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step of this worker.

    Attributes:
        function: name of the function that ran.
        number: how often the function has been called.
        seconds: from the end of the step before to the end of this one.
        phases: for each local replica the seconds of each of ``clocks.PHASES``; they add up to ``seconds``.
        overlapped: for each local replica the seconds in which a transfer was under way while it did something else.
    """

    function: str
    number: int
    seconds: float
    phases: Sequence[Sequence[float]]
    overlapped: Sequence[float]


class FunctionTimes:
    """What is known of one function.

    Steps are noted as they come and added up a few at a time, which is much cheaper.

    Attributes:
        first: seconds of the first measured step, which is kept apart.
        calls: how many steps there were, measured or not.
        count: how many are in the numbers.
        seconds: their time together.
    """

    def __init__(self, num_replicas: int) -> None:
        self.first: float | None = None
        self._num_replicas = num_replicas
        self.clear()

    def clear(self) -> None:
        """Forgets the numbers, but not that the first call is over."""
        self.calls, self.count, self.seconds = 0, 0, 0.0
        self._sums = [[0.0] * (len(PHASES) + 1) for _ in range(self._num_replicas)]
        self._noted: list[_Noted] = []
        self._recent: deque[tuple[float, Sequence[float]]] = deque(maxlen=RECENT)

    def note(self, outside: list[float], inside: list[list[float]]) -> None:
        """Counts one step.

        Args:
            outside: what replica 0's thread did before ``run``.
            inside: what each replica did in it.
        """
        self.calls += 1
        if self.first is None:
            self.first = sum(outside[: len(PHASES)]) + sum(inside[0][: len(PHASES)])
            return
        self._noted.append((outside, inside))
        if len(self._noted) >= _ADDED_TOGETHER:
            self.add_up()

    def add_up(self) -> StepTimes | None:
        """Adds what was noted to the sums; returns the last step, if there is a new one."""
        if not self._noted:
            return None
        before = [sum(column) for column in zip(*[outside for outside, _ in self._noted], strict=True)]
        for replica, sums in enumerate(self._sums):
            columns = zip(*[inside[replica] for _, inside in self._noted], strict=True)
            for place, column in enumerate(columns):
                sums[place] += before[place] + sum(column)
        for outside, inside in self._noted:
            phases = tuple(map(add, outside[: len(PHASES)], inside[0][: len(PHASES)]))
            self._recent.append((sum(phases), phases))
            self.seconds += self._recent[-1][0]
        self.count += len(self._noted)
        outside, inside = self._noted[-1]
        self._noted.clear()
        rows = [list(map(add, outside, own)) for own in inside]
        return StepTimes("", self.calls, sum(rows[0][:-1]), [row[:-1] for row in rows], [row[-1] for row in rows])

    def summary(self) -> dict[str, Any]:
        """The numbers as plain JSON data."""
        self.add_up()
        recent = sorted(seconds for seconds, _ in self._recent)
        return {
            "calls": self.calls,
            "count": self.count,
            "first": self.first,
            "seconds": self.seconds,
            "median": recent[len(recent) // 2] if recent else 0.0,
            "high": recent[min(len(recent) * 19 // 20, len(recent) - 1)] if recent else 0.0,
            "phases": [sums[:-1] for sums in self._sums],
            "overlapped": [sums[-1] for sums in self._sums],
        }

    def recent(self) -> tuple[tuple[float, tuple[float, ...]], ...]:
        """Seconds and phases of the first local replica in each recent step."""
        self.add_up()
        return tuple((seconds, tuple(phases)) for seconds, phases in self._recent)
