"""Runs one function for each local replica, in turn, each in a thread of its own."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.devices import ReplicaDevice, is_accelerator, made_current
from tfstyle_dist.core.errors import ReplicaAborted
from tfstyle_dist.runtime import interrupts, turn_reports
from tfstyle_dist.runtime.ambient import Ambient
from tfstyle_dist.runtime.clocks import STOPPED, Clock
from tfstyle_dist.runtime.one_run import OneRun
from tfstyle_dist.runtime.openmp_pools import OpenMPPools
from tfstyle_dist.runtime.replica_run import Content
from tfstyle_dist.runtime.team import Core, Job, Team
from tfstyle_dist.runtime.turns import TurnRun


class ReplicaExecutor:
    """Runs replica functions one at a time; the turn passes where they wait for each other.

    The functions of replicas 1 to L-1 run in threads that live as long as the executor; replica 0 runs in the caller's
    thread, so Ctrl-C, signals and a debugger work as usual. Threads stuck in user code past the deadline are abandoned
    and replaced.

    Args:
        devices: one device for each local replica.
        timeout: limit of each wait; ``None`` waits for ever.
        clocks: one for each replica; what its waiting is counted by.

    Attributes:
        content: what objects hold for each replica.
        one_run: what lets one thread run at a time; executors of the same objects share it.
    """

    def __init__(
        self, devices: Sequence[ReplicaDevice], timeout: timedelta | None, clocks: Sequence[Clock] | None = None
    ) -> None:
        self._devices, self._timeout = tuple(devices), timeout
        self._kinds = {"cpu", *(device.type for device in devices)} - {"meta"}
        self._places = {device.torch_device for device in devices if is_accelerator(device.type)}
        self._clocks = [STOPPED] * len(self._devices) if clocks is None else clocks
        self.content = Content()
        self._pools = OpenMPPools([device.type for device in devices].count("cpu"))
        self._teams: list[Team] = []
        self.one_run = OneRun(timeout)
        self._pid = os.getpid()
        self._closed, self._under_way = False, 0

    def run(self, functions: Sequence[Callable[[TurnRun], Any]]) -> list[Any]:
        """Calls each function with the run object; returns their results in replica order.

        Args:
            functions: one for each local replica.

        Raises:
            BaseException: whatever the first failing replica raised, the same object, with the replica's number added
                as a note.
            DeadlineExceededError: a replica did not come to a call, or did not finish, within the timeout.
        """
        if self._places:
            torch_internals.share_graph_trees()
        signals, this = interrupts.of_this_thread(), object()
        with self.one_run.exclusive():
            if self._pid != os.getpid():  # threads do not survive a fork
                self._teams, self._pid = [], os.getpid()
            self._under_way += 1
            try:
                signals.begin(this)
                return self._run(functions, signals)
            finally:
                try:
                    signals.end(this)  # may raise what was held back
                finally:
                    self._under_way -= 1
                    self._release()

    def _run(self, functions: Sequence[Callable[[TurnRun], Any]], signals: interrupts.Interrupts) -> list[Any]:
        outcomes: list[Any] = [None] * len(functions)
        if self._closed:
            raise RuntimeError("This strategy was closed; make a new one to run again.")
        ambient, context = Ambient(self._kinds, self._places), contextvars.copy_context()
        self.content.enter(begins=True)
        team = self._acquire_team()

        under_way: list[TurnRun] = []

        def start(replica: int) -> None:
            job = self._job(under_way[0], replica, functions[replica], outcomes, ambient)
            own = context.copy()
            team.queues[replica - 1].put(lambda: own.run(job))

        run = TurnRun(len(functions), self._timeout, start, self.content, self._clocks, signals)
        under_way.append(run)
        team.cores[0] = Core()
        run.cores, run.turn.ends_pools = team.cores, self._pools.begin()
        outer = self.one_run.begin(run)
        try:
            self.content.switch(0)
            with made_current(self._devices[0]):
                self._call(run, 0, functions[0], outcomes, signals)
        finally:
            self.one_run.current = outer
            self.content.switch(None)
            if run.error is not None:
                self.content.fail()
            self.content.leave()
            if run.lost:
                self._teams.remove(team)
                team.stop()
            team.free()
            self._pools.finish(counts=run.error is None)
        error = run.error
        if not run.lost:  # a thread that was abandoned looks at it when it comes back
            run.error = None
        try:
            if error is not None:
                raise error
            return outcomes
        finally:
            # The run and `start` hold each other and the batch, and the error's traceback holds them: until the garbage
            # collector came, all of it would stay.
            under_way.clear()
            del error, run

    def close(self) -> None:
        """Ends the threads; the content of a run that is under way is let go at its end."""
        self._closed = True
        for team in self._teams:
            team.stop()
            team.join()
        self._teams.clear()
        self._release()

    def _release(self) -> None:
        if self._closed and not self._under_way:
            self.content.release()

    # ---- one replica ------------------------------------------------------------------------------------------

    def _job(
        self, run: TurnRun, replica: int, function: Callable[[TurnRun], Any], outcomes: list[Any], ambient: Ambient
    ) -> Job:
        def job() -> None:
            begins = True
            try:
                with ambient.applied(self._devices[replica]):
                    begins = False
                    self._call(run, replica, function, outcomes)
            except BaseException as error:
                if not begins:  # the turn was passed on
                    raise
                self._fail(run, replica, error)
                run.finish(replica)

        return job

    def _call(
        self,
        run: TurnRun,
        replica: int,
        function: Callable[[TurnRun], Any],
        outcomes: list[Any],
        signals: interrupts.Interrupts = interrupts.NONE,
    ) -> None:
        """Runs one replica's function; an exception goes to the run, never out of here."""
        run.threads[replica] = threading.get_ident()
        try:
            try:
                if replica in run.lost:  # given up before it had begun; only now, when those who give up see its thread
                    raise ReplicaAborted
                signals.admit()
                outcomes[replica] = function(run)
            finally:
                signals.hold()
        except ReplicaAborted as error:
            if run.error is None:  # somebody raised it by hand
                run.abort(RuntimeError(f"replica {replica} was aborted: {error}"))
        except BaseException as error:
            self._fail(run, replica, error)
        finally:
            run.finish(replica)

    def _fail(self, run: TurnRun, replica: int, error: BaseException) -> None:
        if run.error is None:
            error.add_note(f"[tfstyle_dist] raised in replica {replica} of {run.count} on this worker")
            turn_reports.explain_what_is_one(error, run.count)
        run.raised(replica, error)

    def _acquire_team(self) -> Team:
        team = next((team for team in self._teams if team.is_free), None)
        if team is None:
            team = Team(self._devices, str(len(self._teams)))
            self._teams.append(team)
        team.busy = True
        return team
