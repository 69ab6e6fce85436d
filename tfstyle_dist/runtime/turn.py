"""Which replica of a process has the turn, and how long the others wait for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.ops.threads import end_pool
from tfstyle_dist.runtime.process_settings import ProcessSettings
from tfstyle_dist.runtime.turn_reports import Call

_INTERRUPT_GRACE = 5.0  # seconds that a replica has to come to a call after Ctrl-C


class Turn:
    """Who has the turn in a run; the first replica, when it begins.

    Attributes:
        holder: the replica that has it.
        passes: how often it was passed on.
        settings: of the process, which each replica has when it has the turn.
        ends_pools: whether a replica's pool of OpenMP ends with its turn.
    """

    def __init__(self) -> None:
        self.holder, self.passes, self._since, self._longest = 0, 0, time.monotonic(), 0.0
        self.settings, self.ends_pools = ProcessSettings(), False

    def pass_to(self, replica: int) -> None:
        """The holder, in its own thread, gives it to another replica."""
        self._longest = max(self._longest, time.monotonic() - self._since)
        if self.ends_pools:
            end_pool()
        self.take(replica)

    def take(self, replica: int) -> None:
        """Another replica has it from now on, whatever the holder does."""
        self.settings.switch(self.holder, replica)
        self.holder, self.passes, self._since = replica, self.passes + 1, time.monotonic()

    def deadline(self, timeout: timedelta | None, interrupted: bool) -> Deadline:
        """When those that wait take it away: they wait as long as the longest turn so far, and ``timeout`` more."""
        if interrupted:
            return Deadline(timedelta(seconds=_INTERRUPT_GRACE))
        return Deadline(None if timeout is None else timeout + timedelta(seconds=self._longest))


def next_of(others: Sequence[int], started: Sequence[bool], waiting: Sequence[Call | None], ends: bool) -> int:
    """Who can go on: those that have not begun in replica order, then those whose call is done, the last first.

    Args:
        others: the replicas but the one that passes the turn on, without those that are done or lost.
        started: which of all replicas have begun.
        waiting: what each of all replicas waits in.
        ends: whether the run ends with an error.
    """
    if ends:
        return others[-1] if others else 0
    fresh = [r for r in others if not started[r]]
    if fresh:
        return fresh[0]
    ready = [r for r in others if (call := waiting[r]) is not None and call.result is not None]
    return ready[-1] if ready else 0  # without: all wait, and the work is the first replica's; or all others are done
