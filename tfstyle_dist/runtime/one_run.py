"""Lets one thread of the program run replicas at a time."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.runtime import turn_reports
from tfstyle_dist.runtime.turns import TurnRun


class OneRun:
    """There is one set of objects, and one count of what replicas do, whichever thread makes a run.

    Args:
        timeout: how long a thread waits while no turn passes in the run of another one; ``None`` waits for ever.

    Attributes:
        current: the run under way.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout = timeout
        self._lock = threading.RLock()
        self.current: TurnRun | None = None
        self._thread = 0  # which made it
        self._pid = os.getpid()

    def begin(self, run: TurnRun) -> TurnRun | None:
        """A run begins in this thread, which has the lock; returns the one that it is in, to be put back."""
        outer, self.current, self._thread = self.current, run, threading.get_ident()
        return outer

    def exclusive(self) -> AbstractContextManager[Any]:
        """One run at a time, whichever thread makes it.

        The lock itself: a context manager around it would leave moments for a Ctrl-C in which nobody lets it go.

        Raises:
            DeadlineExceededError: in the run of another thread no turn passed within the timeout, as in a step that
                waits for this thread. What is done once for all replicas, as in ``merge_call``, may take longer.
        """
        if self._pid != os.getpid():  # threads and their locks do not survive a fork
            self._pid, self._lock, self.current = os.getpid(), threading.RLock(), None
        if self.current is not None and self._thread != threading.get_ident():
            self._wait_for_other_thread()
        return self._lock

    def _wait_for_other_thread(self) -> None:
        seen, deadline = (self.current, -1), Deadline(self._timeout)
        while not self._lock.acquire(timeout=-1 if (pause := deadline.pause()) is None else pause):
            run = self.current
            if run is not None and (run.acting is not None or (run, run.turn.passes) != seen):
                seen, deadline = (run, run.turn.passes), run.turn.deadline(self._timeout, interrupted=False)
            elif deadline.passed():
                raise turn_reports.other_thread_runs(deadline, () if run is None else run.threads)
        self._lock.release()
