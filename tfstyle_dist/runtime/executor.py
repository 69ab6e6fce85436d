"""Runs one function for each local replica: inline for one, in threads for several."""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.core.errors import DeadlineExceededError, ReplicaAborted
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.runtime.clocks import STOPPED, Clock
from tfstyle_dist.runtime.rendezvous import ThreadedRun

_INTERRUPT_GRACE = timedelta(seconds=5)
Job = Callable[[], None]


class _Team:
    """The threads of replicas 1 to L-1; replica 0 uses its caller's thread."""

    def __init__(self, count: int, label: str) -> None:
        self.queues: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in range(count - 1)]
        self.busy = False
        for index, inbox in enumerate(self.queues, start=1):
            threading.Thread(target=_serve, args=(inbox,), name=f"tfstyle-{label}-replica-{index}", daemon=True).start()
        self._finalizer = weakref.finalize(self, _stop, self.queues)

    def stop(self) -> None:
        """Lets the threads end after what they are doing."""
        self._finalizer()


def _serve(inbox: queue.SimpleQueue[Job | None]) -> None:
    while (job := inbox.get()) is not None:
        job()
        del job


def _stop(queues: Sequence[queue.SimpleQueue[Job | None]]) -> None:
    for inbox in queues:
        inbox.put(None)


class _Ambient:
    """What a replica thread takes over from the thread that called ``run``."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        ]
        self.cache = torch.is_autocast_cache_enabled()
        self.device = torch.get_default_device()

    @contextlib.contextmanager
    def applied(self, device: ReplicaDevice, num_threads: int) -> Any:
        """Sets it all in the current thread."""
        with contextlib.ExitStack() as stack:
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device.index))
            if self.device.type != "cpu":  # without an index: the replica's own one
                own = self.device.type == device.type
                stack.enter_context(torch.device(self.device.type) if own else self.device)
            if self.inference:
                stack.enter_context(torch.inference_mode())
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.cache))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            yield


class ReplicaExecutor:
    """Runs replica functions side by side and hands out where they meet.

    The functions of replicas 1 to L-1 run in threads that live as long as the executor; replica 0 runs in the caller's
    thread, so Ctrl-C, signals and a debugger work as usual. Threads stuck in user code past the deadline are abandoned
    and replaced.

    Args:
        devices: one device for each local replica.
        timeout: limit of each wait; ``None`` waits for ever.
        mode: ``"threads"``, or ``"serial"``: one replica at a time in replica order, which makes random numbers
            reproducible.
        clocks: one for each replica; what its waiting is counted by.
    """

    def __init__(
        self,
        devices: Sequence[ReplicaDevice],
        timeout: timedelta | None,
        mode: str = "threads",
        clocks: Sequence[Clock] | None = None,
    ) -> None:
        if mode not in ("threads", "serial"):
            raise ValueError(f"run_replicas must be 'threads' or 'serial', got {mode!r}.")
        self._devices, self._timeout, self._mode = tuple(devices), timeout, mode
        self._clocks = [STOPPED] * len(self._devices) if clocks is None else clocks
        self._teams: list[_Team] = []
        self._runs: list[ThreadedRun] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self.rng: list[torch.Tensor] | None = None

    @property
    def active_run(self) -> ThreadedRun | None:
        """The innermost run under way."""
        return self._runs[-1] if self._runs else None

    def run(self, functions: Sequence[Callable[[ThreadedRun], Any]]) -> list[Any]:
        """Calls each function with the run object; returns their results in replica order.

        Args:
            functions: one for each local replica, at least two.

        Raises:
            BaseException: whatever the first failing replica raised, the same object, with the replica's number added
                as a note.
            DeadlineExceededError: a replica did not come to a meeting, or did not finish, within the timeout.
        """
        if self._closed:
            raise RuntimeError("This strategy was closed; make a new one to run again.")
        count = len(functions)
        team = self._acquire_team(count)
        serial = self._mode == "serial"
        run = ThreadedRun(count, self._timeout, serial, self.rng if serial else None, self._clocks)
        outcomes: list[Any] = [None] * count
        ambient = _Ambient()
        threads_before = torch.get_num_threads()
        rng_before = torch.get_rng_state() if self._mode == "serial" and self.rng is not None else None
        share = max(1, threads_before // count) if self._mode == "threads" else threads_before
        self._runs.append(run)
        try:
            for replica in range(1, count):
                context = contextvars.copy_context()
                job = self._job(run, replica, functions[replica], outcomes, ambient, share)
                team.queues[replica - 1].put(lambda context=context, job=job: context.run(job))  # type: ignore[misc]
            if share != threads_before:
                torch.set_num_threads(share)
            try:
                self._call(run, 0, functions[0], outcomes)
            finally:
                if share != threads_before:
                    torch.set_num_threads(threads_before)
                self._await_others(run, team)
        finally:
            self._runs.remove(run)
            if rng_before is not None:
                torch.set_rng_state(rng_before)
        if run.error is not None:
            error = run.error
            try:
                raise error
            finally:
                del error, run, outcomes
        return outcomes

    def seed(self, seeds: Sequence[int]) -> None:
        """Gives each local replica a stream of random numbers of its own (serial mode only).

        Raises:
            RuntimeError: the replicas run in threads, which share torch's generator.
        """
        if self._mode != "serial":
            raise RuntimeError(
                "seed_replicas with several replicas in one process needs run_replicas='serial': threads share torch's "
                "generator. Or draw from ReplicaContext.generator(seed)."
            )
        self.rng = [torch.Generator().manual_seed(s).get_state() for s in seeds]

    def close(self) -> None:
        """Ends the threads."""
        self._closed = True
        for team in self._teams:
            team.stop()
        self._teams.clear()

    # ---- one replica ------------------------------------------------------------------------------------------

    def _job(
        self,
        run: ThreadedRun,
        replica: int,
        function: Callable[[ThreadedRun], Any],
        outcomes: list[Any],
        ambient: _Ambient,
        num_threads: int,
    ) -> Job:
        device = self._devices[replica]

        def job() -> None:
            with ambient.applied(device, num_threads):
                self._call(run, replica, function, outcomes)

        return job

    def _call(
        self, run: ThreadedRun, replica: int, function: Callable[[ThreadedRun], Any], outcomes: list[Any]
    ) -> None:
        """Runs one replica's function; an exception goes to the run, never out of here."""
        try:
            run.begin(replica)
            outcomes[replica] = function(run)
        except ReplicaAborted as error:
            if run.error is None:  # somebody raised it by hand
                run.abort(RuntimeError(f"replica {replica} was aborted: {error}"))
        except BaseException as error:
            if run.error is None:
                error.add_note(f"[tfstyle_dist] raised in replica {replica} of {run.count} on this worker")
            run.abort(error)
        finally:
            run.finish(replica)

    # ---- teams ------------------------------------------------------------------------------------------------

    def _acquire_team(self, count: int) -> _Team:
        with self._lock:
            if self._pid != os.getpid():  # threads do not survive a fork
                self._teams, self._pid = [], os.getpid()
            for team in self._teams:
                if not team.busy:
                    team.busy = True
                    return team
            team = _Team(count, str(len(self._teams)))
            team.busy = True
            self._teams.append(team)
            return team

    def _await_others(self, run: ThreadedRun, team: _Team) -> None:
        """Waits for the other replicas' threads; abandons those that do not end in time."""
        interrupted = isinstance(run.error, KeyboardInterrupt | SystemExit)
        try:
            stuck = run.wait_finished(Deadline(_INTERRUPT_GRACE if interrupted else self._timeout))
        except BaseException as error:  # Ctrl-C while waiting
            run.abort(error)
            stuck = run.wait_finished(Deadline(_INTERRUPT_GRACE))
        if not stuck:
            team.busy = False
            return
        stacks = run.stacks(stuck)
        self._teams.remove(team)
        team.stop()
        run.abort(
            DeadlineExceededError(
                f"Replica(s) {stuck} did not finish within the limit of "
                f"{self._timeout.total_seconds() if self._timeout else 0:g} s after replica 0 did; their threads are "
                f"abandoned. Set TFSTYLE_TIMEOUT_SECONDS (0: no limit) if the work is just long.\n{stacks}"
            )
        )
        get_logger().error("abandoned the threads of replica(s) %s, which are at:\n%s", stuck, stacks)
