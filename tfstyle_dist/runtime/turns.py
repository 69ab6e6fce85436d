"""One run of several replicas of one process: one of them runs at a time, and the turn passes where they wait.

Each replica has a thread for its stack. Whoever has the turn finds every object that the step uses holding that
replica's content (``Content``). A turn ends only where a replica waits for the others, or where its function ends.

All replicas must make the same calls in the same order. One that raises, or that makes another call, ends the run for
all of them: the others raise in their next call.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import ReplicaAborted
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.core.tracing import region
from tfstyle_dist.core.untraced import untraced
from tfstyle_dist.runtime import turn_reports
from tfstyle_dist.runtime.clocks import STOPPED, WAIT, Clock
from tfstyle_dist.runtime.interrupts import Interrupts
from tfstyle_dist.runtime.replica_run import Action, Content
from tfstyle_dist.runtime.team import Core, end_code_of
from tfstyle_dist.runtime.turn import Turn, next_of
from tfstyle_dist.runtime.turn_reports import Call


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
        threads, cores: the thread of each replica that is inside its function; what moves it.
        turn, acting: who has it; the call whose joint work is being done.
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
        self._content = content or Content()
        self._interrupts = interrupts or Interrupts()
        self.turn, self._clocks = Turn(), [STOPPED] * count if clocks is None else clocks
        self._batons = [threading.Lock() for _ in range(count)]
        for baton in self._batons:
            baton.acquire()
        self._lock = threading.Lock()  # against a replica that comes back after its turn was taken from it
        self._calls: list[Call | None] = [None] * count  # those whose joint work is not done
        self._waiting: list[Call | None] = [None] * count
        self._started, self._done = [True] + [False] * (count - 1), [False] * count
        self.acting: Call | None = None
        self._interrupted = self._others_go_on = False
        self._updates, self._most_updates = [0] * count, 0  # steps of optimizers: by replica; of the one that raised
        self.error: BaseException | None = None
        self.lost: list[int] = []
        self.threads: list[int | None] = [None] * count
        self.cores: list[Core | None] = [None] * count

    # ---- what replicas call -----------------------------------------------------------------------------------

    @untraced
    def barrier(
        self, replica: int, kind: str, payload: Any, action: Action, phase: int = WAIT, anywhere: bool = False
    ) -> Any:
        """See ``ReplicaRun``."""
        call = Call(kind, payload, action, anywhere, sys._getframe(1))
        if replica:
            return self._wait_and_act(replica, call, phase)
        self._interrupts.hold()
        try:
            return self._wait_and_act(replica, call, phase)
        finally:
            self._interrupts.admit()

    def _wait_and_act(self, replica: int, call: Call, phase: int) -> Any:
        clock = self._clocks[replica]
        clock.enter(phase)  # an exception ends the run, and with it what the clock counts
        with region("meet for", call.kind):
            with self._lock:
                self._raise_if_aborted(replica)
                self._content.pause(replica)
                self._calls[replica] = call
                if turn_reports.differ(self._calls, self._done):
                    self._abort_locked(turn_reports.different_calls(self._calls, self._done))
                    self._calls[replica] = None
                    raise ReplicaAborted
            if None not in self._calls and (call.anywhere or replica == 0):
                return self._act(replica, call, clock)
            self._waiting[replica] = call
            self._pass_on(replica)
            self._await_turn(replica, call)
            self._waiting[replica] = None
            self._raise_if_aborted(replica, passed=call.result is not None)
            if call.result is None:  # all are here, and the work is the first replica's
                return self._act(replica, call, clock)
        clock.leave()
        clock.share(call.joint, phase)
        return call.result[0]

    def finish(self, replica: int) -> None:
        """Called by each replica's thread after the user's function, whatever came of it."""
        with self._lock:
            self.threads[replica] = self._calls[replica] = self._waiting[replica] = None  # a call's frame names the run
            self._done[replica] = True
            if replica in self.lost:
                return
            try:
                self._content.pause(replica)
            except RuntimeError as error:
                self._abort_locked(error)  # the first error counts
            if self.error is None and turn_reports.differ(self._calls, self._done):
                self._abort_locked(turn_reports.different_calls(self._calls, self._done))
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

    def raised(self, replica: int, error: BaseException) -> None:
        """A replica's function raised: the others go on to their next call or end, but make no more updates than it."""
        with self._lock:
            if self.error is None:
                self._others_go_on, self._most_updates = isinstance(error, Exception), self._updates[replica]
            self._abort_locked(error)

    def begin_update(self, replica: int) -> None:
        """See ``ReplicaRun``."""
        if self.error is not None and self._updates[replica] >= self._most_updates:
            raise ReplicaAborted
        self._updates[replica] += 1

    def _abort_locked(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self._interrupted |= isinstance(error, KeyboardInterrupt)

    def _raise_if_aborted(self, replica: int, passed: bool = False) -> None:
        goes_on = passed and self._others_go_on and not self._interrupted
        if (self.error is not None and not goes_on) or replica in self.lost:
            raise ReplicaAborted

    # ---- the joint work ---------------------------------------------------------------------------------------

    def _act(self, replica: int, call: Call, clock: Clock) -> Any:
        calls = [c for c in self._calls if c is not None]
        clock.leave()
        before = clock.seconds()
        self.acting = call
        try:
            with region("joint", call.kind):
                payloads = [c.payload for c in calls]
                results = call.action(payloads) if replica else self._act_as_the_first(call, payloads)
        except BaseException as error:
            error.add_note(f"[tfstyle_dist] raised in {call.describe()}, which runs once for all {self.count} replicas")
            self.abort(error)
            raise ReplicaAborted from error
        finally:
            self.acting = None
        with self._lock:
            self._raise_if_aborted(replica)
            joint = clock.since(before)
            for other, result in zip(calls, results, strict=True):
                other.result, other.joint = (result,), joint
            self._calls = [None] * self.count
        return results[replica]

    def _act_as_the_first(self, call: Call, payloads: list[Any]) -> Sequence[Any]:
        if not call.anywhere:
            self._content.switch(None)
            self._content.leave()
        try:
            self._interrupts.admit()
            return call.action(payloads) if call.anywhere else self.turn.settings.for_all(call.action, payloads)
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
            others = [r for r in range(self.count) if r != replica and not self._done[r] and r not in self.lost]
            following = next_of(others, self._started, self._waiting, self.error is not None)
            try:
                self._content.switch(following)
            except BaseException as error:  # the objects hold what they held; nobody may work with that
                self._abort_locked(error)
            self.turn.pass_to(following)
            starts, self._started[following] = not self._started[following], True
            if (core := self.cores[following]) is not None:
                core.fetch()
        if starts:
            self._start(following)
        else:
            with contextlib.suppress(RuntimeError):  # released already: an interrupt came between
                self._batons[following].release()

    def _await_turn(self, replica: int, call: Call | None) -> None:
        """Waits for the turn; takes it from a replica that does not come to a call within the limit."""
        try:
            self._wait(replica, call)
        finally:
            if (core := self.cores[replica]) is not None:
                core.release()

    def _wait(self, replica: int, call: Call | None) -> None:
        baton = self._batons[replica]
        seen, deadline = -1, Deadline(None)
        while True:
            if seen != self.turn.passes:
                seen, deadline = self.turn.passes, self.turn.deadline(self._timeout, self._interrupted)
            pause = deadline.pause()
            try:
                if replica == 0:
                    self._interrupts.admit(waits=True)
                if baton.acquire(timeout=-1 if pause is None else pause):
                    if self.turn.holder == replica:
                        return
                    continue
            except BaseException as error:  # Ctrl-C while the others work
                error.add_note(f"[tfstyle_dist] raised in replica {replica} of {self.count}, which waited")
                again, self._interrupted = self._interrupted, True
                self.abort(error)
                if self.turn.holder == replica:
                    baton.acquire(blocking=False)
                    return
                if again and self._take_turn(replica, seen):
                    return  # the second time
                seen = -1
                continue
            finally:
                if replica == 0:
                    self._interrupts.hold()
            if seen == self.turn.passes and deadline.passed():
                if self._late(replica, call, deadline, seen):
                    return
                seen = -1

    def _late(self, replica: int, call: Call | None, deadline: Deadline, passes: int) -> bool:
        """The one that has the turn keeps it for too long; returns whether ``replica`` has taken it."""
        holder, acting = self.turn.holder, self.acting
        stacks = turn_reports.stacks_of(self.threads, [holder])
        if acting is not None:  # what the joint work waits for has its own limit
            get_logger().warning("replica %d is still busy with %s:\n%s", holder, acting.describe(), stacks)
            return False
        if self.error is None:
            self.abort(turn_reports.came_late(holder, self.count, call, self._timeout, stacks))
        if holder == 0:
            get_logger().error(turn_reports.first_is_late(call, deadline, stacks))
            return False
        return self._take_turn(replica, passes)

    def _take_turn(self, replica: int, passes: int) -> bool:
        """Goes on without the one that has the turn, unless it was passed on meanwhile: its thread is abandoned."""
        with self._lock:
            holder = self.turn.holder
            if holder in (0, replica) or self._done[holder] or passes != self.turn.passes:
                return False
            get_logger().error(turn_reports.given_up(holder, self.threads))
            self.lost.append(holder)
            end_code_of(self.threads[holder])
            self._content.switch(replica)
            self.turn.take(replica)
            return True
