"""One run of several replicas of one process: one of them runs at a time, and the turn passes where they wait.

Each replica has a thread for its stack. Whoever has the turn finds every object that the step uses holding that
replica's content (``Content``). A turn ends only where a replica waits for the others, or where its function ends.

All replicas must make the same calls in the same order. One that raises, or that makes another call, ends the run for
all of them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, Protocol

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import CollectiveMismatchError, DeadlineExceededError, ReplicaAborted
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.core.tracing import region
from tfstyle_dist.runtime.clocks import STOPPED, WAIT, Clock
from tfstyle_dist.runtime.cores import Core
from tfstyle_dist.runtime.interrupts import Interrupts

Action = Callable[[list[Any]], Sequence[Any]]
_NOT_THE_USERS = ("tfstyle_dist.", "torch", "contextlib")
_INTERRUPT_GRACE = 5.0  # seconds that a replica has to come to a call after Ctrl-C


class ReplicaRun(Protocol):
    """One call of ``strategy.run`` as its replicas see it."""

    def barrier(
        self, replica: int, kind: str, payload: Any, action: Action, phase: int = WAIT, anywhere: bool = False
    ) -> Any:
        """Waits for all local replicas, then gives each its part of what ``action`` returns.

        Args:
            replica: local number of the caller.
            kind: what the call is, e.g. ``"merge_call"``; must be the same on all replicas.
            payload: the caller's contribution.
            action: called once, with all payloads in replica order; returns one result for each replica.
            phase: what waiting for the others counts as, see ``clocks``.
            anywhere: the action works with the payloads alone, so any replica's thread may do it, whatever the objects
                hold. Else the first replica's thread does it, in cross-replica context, and what it writes reaches all
                replicas.

        Raises:
            ReplicaAborted: another replica failed, or the replicas made different calls.
        """


class Content(Protocol):
    """What objects hold for each replica."""

    def switch(self, replica: int | None) -> None:
        """Gives the objects one replica's content; ``None``: that of cross-replica context."""

    def enter(self, begins: bool = False) -> None:
        """Cross-replica context ends: what was written there reaches all replicas.

        Args:
            begins: with this call a run begins.
        """

    def leave(self) -> None:
        """Cross-replica context begins: what is written from now on is noticed by ``enter``."""

    def pause(self, replica: int) -> None:
        """The replica that has the turn comes to a call that all make, or to its end.

        Raises:
            RuntimeError: it has done what only one of the replicas may do.
        """


class NoContent:
    """Nothing is swapped."""

    def switch(self, replica: int | None) -> None:
        """See ``Content``."""

    def enter(self, begins: bool = False) -> None:
        """See ``Content``."""

    def leave(self) -> None:
        """See ``Content``."""

    def pause(self, replica: int) -> None:
        """See ``Content``."""


class InlineRun:
    """The run of one replica: it meets nobody."""

    __slots__ = ()

    def barrier(
        self, replica: int, kind: str, payload: Any, action: Action, phase: int = WAIT, anywhere: bool = False
    ) -> Any:
        """Does the joint work at once."""
        return action([payload])[0]


class _Call:
    """What one replica waits in.

    Attributes:
        result: a 1-tuple once the joint work is done.
    """

    __slots__ = ("action", "anywhere", "frame", "joint", "kind", "payload", "result")

    def __init__(self, kind: str, payload: Any, action: Action, anywhere: bool, frame: FrameType) -> None:
        self.kind, self.payload, self.action, self.anywhere, self.frame = kind, payload, action, anywhere, frame
        self.result: tuple[Any] | None = None
        self.joint: Sequence[float] = ()

    def describe(self) -> str:
        """The call and the user's line."""
        line = users_line(self.frame)
        return f"{self.kind} at {line}" if line else self.kind


def users_line(frame: FrameType | None) -> str:
    """The innermost line of a stack that is not of this package or of torch, as ``file:line``."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


class TurnRun:
    """The run of the replicas of one process.

    Args:
        count: number of replicas.
        timeout: how long the others wait for whoever has the turn, beyond the longest turn so far; ``None``: for ever.
        start: starts the thread of a replica; it calls ``finish`` at its end.
        content: what is swapped.
        clocks: one for each replica.
        interrupts: the signals that replica 0's thread gets; held back except where it runs the user's code or waits.

    Attributes:
        error: what ended the run, if something did.
        lost: replicas whose threads are stuck in user code.
        threads: the thread of each replica that is inside its function.
        cores: moves the thread of each replica.
    """

    def __init__(
        self,
        count: int,
        timeout: timedelta | None,
        start: Callable[[int], None],
        content: Content | None = None,
        clocks: Sequence[Clock] | None = None,
        interrupts: Interrupts | None = None,
    ) -> None:
        self.count, self._timeout, self._start = count, timeout, start
        self._content: Content = content or NoContent()
        self._interrupts = interrupts or Interrupts()
        self._clocks = [STOPPED] * count if clocks is None else clocks
        self._batons = [threading.Lock() for _ in range(count)]
        for baton in self._batons:
            baton.acquire()
        self._lock = threading.Lock()  # against a replica that comes back after its turn was taken from it
        self._calls: list[_Call | None] = [None] * count  # those whose joint work is not done
        self._waiting: list[_Call | None] = [None] * count
        self._started, self._done = [False] * count, [False] * count
        self._started[0] = True
        self._turn, self._passes, self._since, self._longest = 0, 0, time.monotonic(), 0.0
        self._acting: _Call | None = None
        self._interrupted = False
        self.error: BaseException | None = None
        self.lost: list[int] = []
        self.threads: list[int | None] = [None] * count
        self.cores: list[Core | None] = [None] * count

    # ---- what replicas call -----------------------------------------------------------------------------------

    def barrier(
        self, replica: int, kind: str, payload: Any, action: Action, phase: int = WAIT, anywhere: bool = False
    ) -> Any:
        """See ``ReplicaRun``."""
        if replica:
            return self._wait_and_act(replica, kind, payload, action, phase, anywhere)
        self._interrupts.hold()
        try:
            return self._wait_and_act(replica, kind, payload, action, phase, anywhere)
        finally:
            self._interrupts.admit()

    def _wait_and_act(self, replica: int, kind: str, payload: Any, action: Action, phase: int, anywhere: bool) -> Any:
        clock = self._clocks[replica]
        clock.enter(phase)  # an exception ends the run, and with it what the clock counts
        with region("meet for", kind):
            call = _Call(kind, payload, action, anywhere, sys._getframe(2))
            with self._lock:
                self._raise_if_aborted(replica)
                self._content.pause(replica)
                self._calls[replica] = call
                if self._differ():
                    self._abort_locked(self._mismatch())
                    self._calls[replica] = None
                    raise ReplicaAborted
            if None not in self._calls and (anywhere or replica == 0):
                return self._act(replica, call, clock)
            self._waiting[replica] = call
            self._pass_on(replica)
            self._await_turn(replica, call)
            self._waiting[replica] = None
            self._raise_if_aborted(replica)
            if call.result is None:  # all are here, and the work is the first replica's
                return self._act(replica, call, clock)
        clock.leave()
        clock.share(call.joint, phase)
        return call.result[0]

    def finish(self, replica: int) -> None:
        """Called by each replica's thread after the user's function, whatever came of it."""
        with self._lock:
            self.threads[replica], self._done[replica] = None, True
            if replica in self.lost:
                return
            if self.error is None:
                try:
                    self._content.pause(replica)
                except RuntimeError as error:
                    self._abort_locked(error)
            if self.error is None and self._differ():
                self._abort_locked(self._mismatch())
            if self.error is not None:
                for other, started in enumerate(self._started):
                    self._done[other] |= not started  # never begins
        if replica:
            self._pass_on(replica)
            return
        # Asked with the turn alone: a replica that is done may not have passed it on yet.
        while not all(done or r in self.lost for r, done in enumerate(self._done)):
            self._pass_on(0)
            self._await_turn(0, None)

    def abort(self, error: BaseException) -> None:
        """Ends the run for all replicas; the first error counts."""
        with self._lock:
            self._abort_locked(error)

    def stacks(self, replicas: Sequence[int]) -> str:
        """Where the threads of some replicas are right now."""
        frames = sys._current_frames()
        parts = []
        for replica in replicas:
            frame = frames.get(self.threads[replica] or -1)
            text = "".join(traceback.format_stack(frame)) if frame is not None else "  (no Python frame)\n"
            parts.append(f"replica {replica} is at:\n{text}")
        return "\n".join(parts)

    # ---- the joint work ---------------------------------------------------------------------------------------

    def _act(self, replica: int, call: _Call, clock: Clock) -> Any:
        calls = [c for c in self._calls if c is not None]
        clock.leave()
        before = clock.seconds()
        self._acting = call
        try:
            with region("joint", call.kind):
                payloads = [c.payload for c in calls]
                results = call.action(payloads) if replica else self._act_as_the_first(call, payloads)
        except BaseException as error:
            error.add_note(f"[tfstyle_dist] raised in {call.describe()}, which runs once for all {self.count} replicas")
            self.abort(error)
            raise ReplicaAborted from error
        finally:
            self._acting = None
        with self._lock:
            self._raise_if_aborted(replica)
            joint = clock.since(before)
            for other, result in zip(calls, results, strict=True):
                other.result, other.joint = (result,), joint
            self._calls = [None] * self.count
        return results[replica]

    def _act_as_the_first(self, call: _Call, payloads: list[Any]) -> Sequence[Any]:
        if not call.anywhere:
            self._content.switch(None)
            self._content.leave()
        try:
            self._interrupts.admit()
            return call.action(payloads)
        finally:
            self._interrupts.hold()
            if not call.anywhere:
                self._content.enter()
                self._content.switch(0)

    # ---- the turn ---------------------------------------------------------------------------------------------

    def _pass_on(self, replica: int) -> None:
        """Gives the turn to a replica that can go on."""
        with self._lock:
            if replica in self.lost:
                return
            following = self._next(replica)
            now = time.monotonic()
            self._longest = max(self._longest, now - self._since)
            try:
                self._content.switch(following)
            except BaseException as error:  # the objects hold what they held; nobody may work with that
                self._abort_locked(error)
            self._turn, self._passes, self._since = following, self._passes + 1, now
            starts = not self._started[following]
            self._started[following] = True
            core = self.cores[following]
            if core is not None:
                core.fetch()
        if starts:
            self._start(following)
        else:
            with contextlib.suppress(RuntimeError):  # released already: an interrupt came between
                self._batons[following].release()

    def _next(self, replica: int) -> int:
        """Who can go on: those that have not begun in replica order, then those whose call is done, the last first."""
        others = [r for r in range(self.count) if r != replica and not self._done[r] and r not in self.lost]
        if self.error is None:
            fresh = [r for r in others if not self._started[r]]
            if fresh:
                return fresh[0]
            ready = [r for r in others if (call := self._waiting[r]) is not None and call.result is not None]
            if ready:
                return ready[-1]
            return 0  # all wait, and the work is the first replica's; or all others are done
        return others[-1] if others else 0

    def _await_turn(self, replica: int, call: _Call | None) -> None:
        """Waits for the turn; takes it from a replica that does not come to a call within the limit."""
        try:
            self._wait(replica, call)
        finally:
            core = self.cores[replica]
            if core is not None:
                core.release()

    def _wait(self, replica: int, call: _Call | None) -> None:
        baton = self._batons[replica]
        seen, deadline = -1, Deadline(None)
        while True:
            if seen != self._passes:
                seen, deadline = self._passes, self._new_deadline()
            pause = deadline.pause()
            try:
                if replica == 0:
                    self._interrupts.admit()
                if baton.acquire(timeout=-1 if pause is None else pause):
                    if self._turn == replica:
                        return
                    continue
            except BaseException as error:  # Ctrl-C while the others work
                error.add_note(f"[tfstyle_dist] raised in replica {replica} of {self.count}, which waited")
                again, self._interrupted = self._interrupted, True
                self.abort(error)
                if self._turn == replica:
                    baton.acquire(blocking=False)
                    return
                if again and self._take_turn(replica, seen):
                    return  # the second time
                seen = -1
                continue
            finally:
                if replica == 0:
                    self._interrupts.hold()
            if seen == self._passes and deadline.passed():
                if self._late(replica, call, deadline, seen):
                    return
                seen = -1

    def _new_deadline(self) -> Deadline:
        if self._interrupted:
            return Deadline(timedelta(seconds=_INTERRUPT_GRACE))
        return Deadline(None if self._timeout is None else self._timeout + timedelta(seconds=self._longest))

    def _late(self, replica: int, call: _Call | None, deadline: Deadline, passes: int) -> bool:
        """The one that has the turn keeps it for too long; returns whether ``replica`` has taken it."""
        holder, acting = self._turn, self._acting
        if acting is not None:  # what the joint work waits for has its own limit
            get_logger().warning(
                "replica %d is still busy with %s:\n%s", holder, acting.describe(), self.stacks([holder])
            )
            return False
        stacks = self.stacks([holder])
        if self.error is None:
            limit = f"{self._timeout.total_seconds() if self._timeout else 0:g} s"
            if call is not None:
                said = f"Replica(s) [{holder}] of {self.count} did not come to {call.describe()} within {limit}."
            else:
                said = (
                    f"Replica(s) [{holder}] did not finish within the limit of {limit} after replica 0 did. Set "
                    "TFSTYLE_TIMEOUT_SECONDS (0: no limit) if the work is just long."
                )
            self.abort(DeadlineExceededError(f"{said}\n{stacks}"))
        if holder == 0:
            get_logger().error(
                "replica 0 did not come to %s within %s. It runs in the thread that called run, which cannot be "
                "abandoned: the error is raised when its function returns.\n%s",
                "a call that all replicas make" if call is None else call.describe(),
                deadline,
                stacks,
            )
            return False
        return self._take_turn(replica, passes)

    def _take_turn(self, replica: int, passes: int) -> bool:
        """Goes on without the one that has the turn, unless it was passed on meanwhile: its thread is abandoned."""
        with self._lock:
            holder = self._turn
            if holder in (0, replica) or self._done[holder] or passes != self._passes:
                return False
            get_logger().error(
                "abandoned the thread of replica(s) %s, which are at:\n%s", [holder], self.stacks([holder])
            )
            self.lost.append(holder)
            self._content.switch(replica)
            self._turn, self._passes, self._since = replica, self._passes + 1, time.monotonic()
            return True

    # ---- inside the lock --------------------------------------------------------------------------------------

    def _abort_locked(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self._interrupted |= isinstance(error, KeyboardInterrupt)

    def _raise_if_aborted(self, replica: int) -> None:
        if self.error is not None or replica in self.lost:
            raise ReplicaAborted

    def _differ(self) -> bool:
        """Whether some replica waits in a call that not all will make."""
        open_calls = [c for c in self._calls if c is not None]
        if not open_calls:
            return False
        return any(self._done) or any(c.kind != open_calls[0].kind for c in open_calls)

    def _mismatch(self) -> CollectiveMismatchError:
        lines = []
        for replica, call in enumerate(self._calls):
            if call is not None:
                did = call.describe()
            elif self._done[replica]:
                did = "finished without another call"
            else:
                did = "has not come to a call yet"
            lines.append(f"  replica {replica}: {did}")
        return CollectiveMismatchError(
            "The replicas made different calls: a different number of merge_call / all_reduce / all_gather calls or "
            "gradient reductions. Every replica must make the same ones in the same order:\n" + "\n".join(lines)
        )
