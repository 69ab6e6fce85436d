"""Where the replicas of one process meet during one ``run``.

All replicas must make the same calls in the same order. The first replica's thread does the joint work; the others
wait. A replica that raises, or that makes another call, ends the run for all of them.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, Protocol

import torch

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import CollectiveMismatchError, DeadlineExceededError, ReplicaAborted
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.core.tracing import region
from tfstyle_dist.runtime.clocks import STOPPED, WAIT, Clock

Action = Callable[[list[Any]], Sequence[Any]]


class ReplicaRun(Protocol):
    """One call of ``strategy.run`` as its replicas see it."""

    def meet(self, replica: int, kind: str, payload: Any, action: Action, phase: int = WAIT) -> Any:
        """Waits for all local replicas, then gives each its part of what ``action`` returns.

        Args:
            replica: local number of the caller.
            kind: what the call is, e.g. ``"merge_call"``; must be the same on all replicas.
            payload: the caller's contribution.
            action: called once, with all payloads in replica order; returns one result for each replica.
            phase: what waiting for the others counts as, see ``clocks``.

        Raises:
            ReplicaAborted: another replica failed, or the replicas made different calls.
        """


class InlineRun:
    """The run of one replica: it meets nobody."""

    __slots__ = ()

    def meet(self, replica: int, kind: str, payload: Any, action: Action, phase: int = WAIT) -> Any:
        """Does the joint work at once."""
        return action([payload])[0]


class _Call:
    """What one replica asks for at a meeting."""

    __slots__ = ("frame", "kind", "payload")

    def __init__(self, kind: str, payload: Any, frame: FrameType) -> None:
        self.kind, self.payload, self.frame = kind, payload, frame

    def describe(self) -> str:
        """The call and the user's line."""
        frame: FrameType | None = self.frame
        while frame is not None and frame.f_globals.get("__name__", "").startswith(("tfstyle_dist.", "torch")):
            frame = frame.f_back
        return self.kind if frame is None else f"{self.kind} at {frame.f_code.co_filename}:{frame.f_lineno}"


class ThreadedRun:
    """The run of L >= 2 replicas, each in its own thread.

    Args:
        count: number of replicas.
        timeout: limit of each wait.
        serial: only one replica runs at a time, in replica order.
        rng: in serial mode, one RNG state for each replica, swapped in when its turn comes.
        clocks: one for each replica.
    """

    def __init__(
        self,
        count: int,
        timeout: timedelta | None,
        serial: bool = False,
        rng: list[torch.Tensor] | None = None,
        clocks: Sequence[Clock] | None = None,
    ) -> None:
        self.count, self._timeout = count, timeout
        self._condition = threading.Condition()
        self._calls: list[_Call | None] = [None] * count
        self._arrived = self._finished = self._generation = 0
        self._done = [False] * count
        self._results: Sequence[Any] = ()
        self._clocks = [STOPPED] * count if clocks is None else clocks
        self._joint: Sequence[float] = ()
        self._released = self._together = 0.0
        self._error: BaseException | None = None
        self._serial, self._turn, self._rng = serial, 0, rng
        self.threads: list[int | None] = [None] * count

    # ---- what replicas call -----------------------------------------------------------------------------------

    def meet(self, replica: int, kind: str, payload: Any, action: Action, phase: int = WAIT) -> Any:
        """See ``ReplicaRun``."""
        clock, call = self._clocks[replica], _Call(kind, payload, sys._getframe(1))
        clock.enter(phase)  # an exception ends the run, and with it what the clock counts
        with region("meet for", kind), self._condition:
            self._raise_if_aborted()
            self._calls[replica] = call
            self._arrived += 1
            generation = self._generation
            if self._arrived + self._finished == self.count:
                self._check_same()
                self._condition.notify_all()
            self._pass_turn(replica)
            if replica != 0:
                self._wait(lambda: self._generation != generation, call)
                result = self._results[replica]
                self._take_turn(replica)
                if self._joint and not self._serial:
                    clock.leave(self._released)
                    clock.share(self._joint, phase)
                else:  # what the first replica does for all of them counts as what this one does here
                    clock.leave(None if self._serial else self._together)
                return result
            self._wait(lambda: self._arrived == self.count, call)
            payloads = [c.payload for c in self._calls if c is not None]
        clock.leave()
        begin, before = clock.last, clock.seconds()
        try:
            with region("joint", kind):
                results = action(payloads)
        except BaseException as error:
            error.add_note(f"[tfstyle_dist] raised in {call.describe()}, which runs once for all {self.count} replicas")
            self.abort(error)
            raise ReplicaAborted from error
        with self._condition:
            self._raise_if_aborted()
            self._results, self._together = results, begin
            # Only work that went through other phases has to be shared out by phase.
            self._joint = () if clock.last == begin else clock.since(before)
            self._released = clock.last
            self._calls = [None] * self.count
            self._arrived, self._turn = 0, 0
            self._generation += 1
            self._condition.notify_all()
        if self._serial and self._rng is not None:
            torch.set_rng_state(self._rng[0])
        return results[0]

    def begin(self, replica: int) -> None:
        """Called by each replica's thread before the user's function.

        Raises:
            ReplicaAborted: another replica failed before this one's turn came.
        """
        with self._condition:
            self.threads[replica] = threading.get_ident()
            self._take_turn(replica)
            self._raise_if_aborted()

    def finish(self, replica: int) -> None:
        """Called by each replica's thread after the user's function, whatever came of it."""
        with self._condition:
            self.threads[replica] = None
            self._done[replica] = True
            self._finished += 1
            if self._error is None and self._arrived > 0 and self._arrived + self._finished == self.count:
                self._abort_locked(self._mismatch())
            self._pass_turn(replica)
            self._condition.notify_all()

    def abort(self, error: BaseException) -> None:
        """Ends the run for all replicas; the first error counts."""
        with self._condition:
            self._abort_locked(error)

    @property
    def error(self) -> BaseException | None:
        """What ended the run, if something did."""
        return self._error

    def wait_finished(self, deadline: Deadline) -> list[int]:
        """Waits until all replicas have finished; returns those that have not by the deadline."""
        with self._condition:
            while self._finished < self.count:
                if deadline.passed():
                    return [r for r in range(self.count) if not self._done[r]]
                self._condition.wait(deadline.pause())
        return []

    def stacks(self, replicas: Sequence[int]) -> str:
        """Where the threads of some replicas are right now."""
        frames = sys._current_frames()
        parts = []
        for replica in replicas:
            frame = frames.get(self.threads[replica] or -1)
            text = "".join(traceback.format_stack(frame)) if frame is not None else "  (no Python frame)\n"
            parts.append(f"replica {replica} is at:\n{text}")
        return "\n".join(parts)

    # ---- inside the lock --------------------------------------------------------------------------------------

    def _abort_locked(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._condition.notify_all()

    def _raise_if_aborted(self) -> None:
        if self._error is not None:
            raise ReplicaAborted

    def _wait(self, ready: Callable[[], bool], call: _Call) -> None:
        deadline = Deadline(self._timeout)
        while not ready():
            self._raise_if_aborted()
            if not deadline.passed():
                self._condition.wait(deadline.pause())
            elif self._arrived == self.count:
                # All are here, and the first replica does the joint work; what that waits for has its own deadline.
                get_logger().warning("replica 0 is still busy with %s:\n%s", call.describe(), self.stacks([0]))
                deadline = Deadline(self._timeout)
            else:
                self._give_up(call, deadline)
        self._raise_if_aborted()

    def _give_up(self, call: _Call, deadline: Deadline) -> None:
        absent = [r for r, c in enumerate(self._calls) if c is None]
        stacks = self.stacks(absent)
        self._abort_locked(
            DeadlineExceededError(
                f"Replica(s) {absent} of {self.count} did not come to {call.describe()} within {deadline}.\n{stacks}"
            )
        )
        if 0 in absent:
            get_logger().error(
                "replica 0 did not come to %s within %s. It runs in the thread that called run, which cannot be "
                "abandoned: the error is raised when its function returns.\n%s",
                call.describe(),
                deadline,
                stacks,
            )

    def _check_same(self) -> None:
        calls = [c for c in self._calls if c is not None]
        if len(calls) < self.count or any(c.kind != calls[0].kind for c in calls):
            self._abort_locked(self._mismatch())

    def _mismatch(self) -> CollectiveMismatchError:
        lines = []
        for replica, call in enumerate(self._calls):
            did = call.describe() if call is not None else "finished without another call"
            lines.append(f"  replica {replica}: {did}")
        return CollectiveMismatchError(
            "The replicas made different calls: a different number of merge_call / all_reduce / all_gather "
            "calls, gradient "
            "reductions or optimizer steps. Every replica must make the same ones in the same order:\n"
            + "\n".join(lines)
        )

    # ---- serial mode ------------------------------------------------------------------------------------------

    def _take_turn(self, replica: int) -> None:
        if not self._serial:
            return
        while self._turn != replica and self._error is None:
            self._condition.wait()
        if self._rng is not None and self._error is None:
            torch.set_rng_state(self._rng[replica])

    def _pass_turn(self, replica: int) -> None:
        if not self._serial:
            return
        if self._rng is not None and self._error is None:
            self._rng[replica] = torch.get_rng_state()
        self._turn = next((r for r in range(replica + 1, self.count) if not self._done[r]), self.count)
        self._condition.notify_all()
