"""The threads of the replicas of one process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.devices import ReplicaDevice, made_current
from tfstyle_dist.core.errors import ReplicaAborted
from tfstyle_dist.core.logging import get_logger

Job = Callable[[], None]
_LARGEST_HELD = 1 << 25  # of glibc: larger blocks never come from memory that was freed
_TO_END = 1.0  # seconds that an idle thread has to end; one that still works ends later, by itself


class Core:
    """Moves one thread to the core of the one that wakes it up, for that moment: what it starts may run anywhere.

    Replicas that take turns work on the same Python objects. If each woke up on a core of its own, every object that a
    turn touches would travel from cache to cache, which makes small steps twice as slow (``docs/log.md``).
    """

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        self._allowed = os.sched_getaffinity(0) if _current is not None else set()
        self._moved = False

    def fetch(self) -> None:
        """Called by another thread: when this one wakes up, it does so on the caller's core."""
        if _current is None or len(self._allowed) < 2:
            return
        core = _current()
        if core in self._allowed:
            try:
                os.sched_setaffinity(self._thread, {core})
                self._moved = True
            except OSError:  # not allowed here, or the thread is gone
                self._allowed = set()

    def release(self) -> None:
        """Called by the thread itself when it has woken up: it may run anywhere again."""
        if self._moved:
            self._moved = False
            os.sched_setaffinity(0, self._allowed)


def _find() -> Callable[[], int] | None:
    try:
        found = ctypes.CDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return None
    return found if hasattr(os, "sched_setaffinity") else None


_current = _find()


class Team:
    """The threads of replicas 1 to L-1; replica 0 uses its caller's thread."""

    def __init__(self, devices: Sequence[ReplicaDevice], label: str) -> None:
        count = len(devices)
        self.queues: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in range(count - 1)]
        self.cores: list[Core | None] = [None] * count
        self.busy = False
        _keep_freed_memory()
        self._threads = [
            threading.Thread(
                target=_serve, args=(inbox, self.cores, i, devices[i]), name=f"tfstyle-{label}-replica-{i}", daemon=True
            )
            for i, inbox in enumerate(self.queues, start=1)
        ]
        for thread in self._threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _stop, self.queues)
        _live_teams.add(self)

    @property
    def is_free(self) -> bool:
        """Whether its threads wait for a run; those of a process that ends have ended."""
        return self._finalizer.alive and not self.busy

    def free(self) -> None:
        """A run is over; one that a function of ``atexit`` made has been the last."""
        self.busy = False
        if _process_ends:
            self.stop()
            self.join()

    def stop(self) -> None:
        """Lets the threads end after what they are doing."""
        if self._finalizer.detach() is not None:  # a call of it does nothing once the process ends
            _stop(self.queues)

    def join(self) -> None:
        """Waits a moment for the threads: until they end they hold what they ran last."""
        deadline = Deadline(timedelta(seconds=_TO_END))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())
        # Python's join returns before a thread has freed what torch keeps for it, Python objects among it: with an
        # interpreter that is through by then, the process would abort.
        for thread in self._threads:
            while not thread.is_alive() and _has_task(thread) and deadline.remaining():
                time.sleep(0.0005)


def end_code_of(thread: int | None) -> None:
    """Raises ReplicaAborted in a thread that was abandoned, at its next instruction of Python.

    Without it the thread would write to objects that hold another replica's content by then, as far as its next call.

    Args:
        thread: its identifier; ``None``: it is inside of no function.
    """
    if thread is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(ReplicaAborted))


def _has_task(thread: threading.Thread) -> bool:
    return os.path.exists(f"/proc/self/task/{thread.native_id}")


_live_teams: weakref.WeakSet[Team] = weakref.WeakSet()
_process_ends = False


@atexit.register
def _end_threads() -> None:
    """Of strategies that were not closed."""
    global _process_ends
    _process_ends = True
    for team in list(_live_teams):
        team.stop()
    for team in list(_live_teams):
        team.join()


def _keep_freed_memory() -> None:
    """Lets the C library keep 64 MB of what a thread frees, as glibc does once a program has freed a block of 32 MB.

    Before that the memory of gradients and activations goes back to the system in each step of a replica's thread, and
    comes again as new pages. ``MALLOC_TRIM_THRESHOLD_`` and ``MALLOC_MMAP_THRESHOLD_`` in the environment count more.
    """
    torch.empty(_LARGEST_HELD - 8192, dtype=torch.uint8, device="cpu")


def _serve(inbox: queue.SimpleQueue[Job | None], cores: list[Core | None], index: int, device: ReplicaDevice) -> None:
    core = cores[index] = Core()
    if device.type == "cuda":
        # CUDA's own first call makes its context that of the thread; cuBLAS, coming first, would warn.
        with made_current(device):
            torch.cuda.current_stream().query()
    with contextlib.suppress(ReplicaAborted):  # of a thread that was abandoned, and had just come to its end
        while (job := inbox.get()) is not None:
            core.release()
            try:
                job()
            except BaseException:  # the thread is needed again
                get_logger().exception("what a replica's thread had changed for its step could not be put back")
            del job


def _stop(queues: Sequence[queue.SimpleQueue[Job | None]]) -> None:
    for inbox in queues:
        inbox.put(None)
