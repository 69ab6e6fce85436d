"""One scheduled call, and when one more may start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfstyle_dist.coordinator.remote_value import RemoteValue


@dataclass(frozen=True)
class CoordinatorStatistics:
    """What ``ClusterCoordinator.statistics`` tells.

    Attributes:
        waiting: functions that no worker has yet.
        running: functions that a worker has; each is given the next one while it runs one.
        finished: functions that have returned.
        staleness: how many functions finished while one ran, the mean over the last 100: so many updates the
            parameters that it had pulled were behind when its own came.
    """

    waiting: int
    running: int
    finished: int
    staleness: float


class Closure:
    """One scheduled call.

    Attributes:
        number: from 1 on, in the order of scheduling.
        function: number of the function.
        parts: its pickled arguments.
        attempt: how often it was given to a worker.
        result: what the caller of ``schedule`` holds.
        worker: the only worker that may run it; ``None``: any.
        settings: of optimizers, by number, when it was scheduled; a list is another one when something in it is new.
        seen: how many functions had finished when it started.
        values: results of other calls among its arguments.
        missing: how many of them are not there yet.
    """

    __slots__ = (
        "attempt", "finished", "function", "missing", "number", "parts", "result", "seen", "settings", "values",
        "worker",
    )  # fmt: skip

    def __init__(
        self, number: int, function: int, parts: Sequence[Any], result: RemoteValue, worker: int | None
    ) -> None:
        self.number, self.function, self.parts, self.result, self.worker = number, function, parts, result, worker
        self.attempt, self.finished, self.missing, self.seen = 0, False, 0, 0
        self.values: tuple[RemoteValue, ...] = ()
        self.settings: Mapping[int, Sequence[Any]] = {}


class Staleness:
    """Decides whether one more call may start, so that few others end during any call.

    A call reads parameters when it starts and has sent its update when it ends. While it is at work at most ``bound``
    others end: those that have ended since it started, and all that are at work beside it now.

    Args:
        bound: the most; ``None``: any number.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._ended: dict[int, int] = {}  # by call at work: how many others have ended since it started

    def may_start(self) -> bool:
        """Whether a call may start now."""
        if self._bound is None:
            return True
        return len(self._ended) + max(self._ended.values(), default=0) <= self._bound

    def start(self, number: int) -> None:
        """A call starts."""
        if self._bound is not None:
            self._ended[number] = 0

    def end(self, number: int) -> None:
        """A call has ended, or was lost: it may have made some of its updates."""
        if self._ended.pop(number, None) is not None:
            for other in self._ended:
                self._ended[other] += 1
