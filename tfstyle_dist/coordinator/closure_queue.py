"""Scheduled functions on their way: waiting, running, finished; errors and cancellation."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from tfstyle_dist.coordinator.closure import Closure, CoordinatorStatistics, Staleness
from tfstyle_dist.coordinator.remote_value import RemoteValue
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import CancelledError, DeadlineExceededError
from tfstyle_dist.core.logging import get_logger

_SAY_EVERY = 10.0
_LET_END = timedelta(minutes=5)
"""So long an error waits for functions that still run, unless the caller has a limit of its own."""
_MOST_RANGES, _MOST_LOOKED_AT = 1000, 100_000


class ClosureQueue:
    """All scheduled calls of one coordinator; thread-safe.

    Args:
        max_staleness: how many other calls may end between the start and the end of one; ``None``: any number.
    """

    def __init__(self, max_staleness: int | None = None) -> None:
        self.changed = threading.Condition()
        self._staleness = Staleness(max_staleness)
        self._number = 0
        self._waiting: deque[Closure] = deque()
        self._pinned: dict[int, deque[Closure]] = {}
        self._dependents: dict[int, list[Closure]] = {}  # by number of the call whose result they wait for
        self._unfinished: OrderedDict[int, None] = OrderedDict()
        self._above_started = 1
        self._running = 0
        self._error: BaseException | None = None
        self._over: BaseException | None = None  # why nothing can run any more
        self.finished = 0
        self._seen_staleness: deque[int] = deque(maxlen=100)

    # ---- the program's side -----------------------------------------------------------------------------------

    @property
    def next_number(self) -> int:
        """Of the next call that is added."""
        return self._number + 1

    def put(
        self,
        function: int,
        parts: Sequence[Any],
        worker: int | None,
        values: Sequence[RemoteValue] = (),
        settings: Mapping[int, Sequence[Any]] | None = None,
    ) -> RemoteValue:
        """Adds a call: see ``Closure``.

        Args:
            function: of it.
            parts: of it.
            worker: of it.
            settings: of it.
            values: results among the arguments: the call waits for them.

        Raises:
            Exception: the error of an earlier function that nobody has seen yet, or that of a function whose result is
                among the arguments, or why nothing can run any more.
        """
        with self.changed:
            self._raise_error(None)
            if self._over is not None:
                raise self._over.with_traceback(None)
            missing = {v.number for v in values if not v.is_ready()}
            self._number += 1
            closure = Closure(self._number, function, parts, RemoteValue(self.changed, self._number), worker)
            self._unfinished[closure.number] = None
            closure.values, closure.missing, closure.settings = tuple(values), len(missing), settings or {}
            for number in missing:
                self._dependents.setdefault(number, []).append(closure)
            if not missing:
                self._line(closure).append(closure)
            return closure.result

    def _line(self, closure: Closure) -> deque[Closure]:
        """Where it waits."""
        return self._waiting if closure.worker is None else self._pinned.setdefault(closure.worker, deque())

    def is_wanted(self, closure: Closure) -> bool:
        """Whether another call waits for the result."""
        return closure.number in self._dependents

    def wait(self, deadline: Deadline, who_is_absent: Callable[[], str]) -> None:
        """Waits until everything is finished.

        Args:
            deadline: until when.
            who_is_absent: tells, for messages, which workers are not there.

        Raises:
            Exception: the first error since the last one that was raised.
            DeadlineExceededError: not finished in time.
        """
        say = time.monotonic() + _SAY_EVERY
        with self.changed:
            while self._error is None and (self._running or self._any_waiting()):
                if deadline.passed():
                    raise DeadlineExceededError(
                        f"{self._running} scheduled functions are running and {self._count_waiting()} are waiting "
                        f"after {deadline}.{who_is_absent()}"
                    )
                self.changed.wait(deadline.pause() or 1.0)
                if time.monotonic() > say:
                    say = time.monotonic() + _SAY_EVERY
                    if absent := who_is_absent():
                        get_logger().warning("join() waits for %d functions.%s", self._pending(), absent)
            self._raise_error(deadline)

    def done(self) -> bool:
        """Whether nothing is pending.

        Raises:
            Exception: as ``wait``.
        """
        with self.changed:
            self._raise_error(None)
            return self._pending() == 0

    def statistics(self) -> CoordinatorStatistics:
        """Counts of this moment."""
        with self.changed:
            mean = sum(self._seen_staleness) / max(len(self._seen_staleness), 1)
            return CoordinatorStatistics(self._count_waiting(), self._running, self.finished, mean)

    def _raise_error(self, deadline: Deadline | None) -> None:
        if self._error is None:
            return
        # What runs is let end, so that nothing of before the error happens after it.
        limit = Deadline(_LET_END) if deadline is None or deadline.limit is None else deadline
        say = time.monotonic() + _SAY_EVERY
        while self._running and not limit.passed():
            self.changed.wait(limit.pause() or 1.0)
            if time.monotonic() > say:
                say = time.monotonic() + _SAY_EVERY
                get_logger().warning(
                    "a function has failed (%r); its error is raised when the %d that still run have ended, at most %s "
                    "after it was noticed", self._error, self._running, limit,
                )  # fmt: skip
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _any_waiting(self) -> bool:
        return bool(self._waiting or self._dependents) or any(self._pinned.values())

    def _count_waiting(self) -> int:
        blocked = {c.number for dependents in self._dependents.values() for c in dependents}
        return len(self._waiting) + sum(len(q) for q in self._pinned.values()) + len(blocked)

    def _pending(self) -> int:
        return self._running + self._count_waiting()

    # ---- the workers' side ------------------------------------------------------------------------------------

    def take(self, worker: int) -> Closure | None:
        """The next call for a worker; ``None`` when there is none."""
        with self.changed:
            queue = self._pinned.get(worker) or self._waiting
            if not queue or not self._staleness.may_start():
                return None
            closure = queue.popleft()
            self._staleness.start(closure.number)
            closure.attempt += 1
            self._above_started = max(self._above_started, closure.number + 1)
            closure.seen = self.finished
            self._running += 1
            return closure

    def put_back(self, closures: Iterable[Closure]) -> None:
        """A worker was lost: its calls are first in line for another one."""
        with self.changed:
            for closure in sorted(closures, key=lambda c: -c.number):
                self._running -= 1
                self._staleness.end(closure.number)
                if self._error is not None:
                    self._cancel(closure)
                else:
                    self._line(closure).appendleft(closure)
            self.changed.notify_all()

    def finish(self, closure: Closure, value: Any, following: Iterable[Closure] = ()) -> None:
        """A call has returned.

        Args:
            closure: the call.
            value: what it returned.
            following: what its worker has to run next: the first of them starts now.
        """
        with self.changed:
            closure.result.set_value(value)
            self._seen_staleness.append(self.finished - closure.seen)
            self.finished += 1
            for first in itertools.islice(following, 1):
                first.seen = self.finished
            self._end(closure)
            for dependent in self._dependents.pop(closure.number, ()):
                dependent.missing -= 1
                if dependent.missing == 0:
                    self._line(dependent).append(dependent)

    def fail(self, closure: Closure, error: BaseException) -> None:
        """A call has raised: what waits is cancelled."""
        with self.changed:
            closure.result.set_error(error)
            self._note(error)
            self._end(closure)

    def fail_all(self, error: BaseException) -> None:
        """What waits cannot run, e.g. because the workers refuse this program."""
        with self.changed:
            self._note(error)
            self.changed.notify_all()

    def end(self, error: BaseException, running: Iterable[Closure]) -> None:
        """Nothing can run any more: whoever waits, and whoever adds a call from now on, is told why.

        Args:
            error: why.
            running: the calls that workers have.
        """
        with self.changed:
            self._over = error
            if self._pending():
                self._note(error)
            for closure in running:
                closure.result.set_error(error)
                self._end(closure)
            self.changed.notify_all()

    def _note(self, error: BaseException) -> None:
        if self._error is not None:
            return
        self._error = error
        for queue in (self._waiting, *self._pinned.values()):
            while queue:
                self._cancel(queue.popleft())
        for dependents in self._dependents.values():
            for closure in dependents:
                if not closure.finished:
                    self._cancel(closure)
        self._dependents.clear()

    def _cancel(self, closure: Closure) -> None:
        closure.result.set_error(
            self._over
            or CancelledError(
                f"This function was cancelled because another one failed: {self._error!r}. Schedule it again."
            )
        )
        self._forget(closure)

    def _end(self, closure: Closure) -> None:
        self._forget(closure)
        self._running -= 1
        self._staleness.end(closure.number)
        self.changed.notify_all()

    def _forget(self, closure: Closure) -> None:
        closure.finished = True
        closure.parts, closure.values, closure.settings = (), (), {}
        self._unfinished.pop(closure.number, None)

    def low_water(self) -> int:
        """Every call with a smaller number is finished."""
        with self.changed:
            return next(iter(self._unfinished), self._number + 1)

    def unfinished(self) -> tuple[int, list[tuple[int, int]]]:
        """Which calls are finished although one before them is not.

        Returns:
            A number, and the calls with smaller ones that are not finished: ranges, without their ends.
        """
        ranges: list[tuple[int, int]] = []
        with self.changed:
            for index, number in enumerate(self._unfinished):
                if number >= self._above_started:
                    break
                if ranges and ranges[-1][1] == number:
                    ranges[-1] = ranges[-1][0], number + 1
                elif len(ranges) == _MOST_RANGES or index == _MOST_LOOKED_AT:
                    return number, ranges
                else:
                    ranges.append((number, number + 1))
            return self._above_started, ranges
