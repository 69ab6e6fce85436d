"""Where a worker waits: for its own thread of connections, and for workers of its host that write to shared memory."""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

from tfstyle_dist.shm import memory_file, ordering
from tfstyle_dist.shm.futex import Futex
from tfstyle_dist.shm.namespaces import sharing_id

_RUNG, _SLEEPS = 0, 8  # words of 8 bytes, each in a cache line of its own
_LIMIT_SECONDS = 0.1
Announced = list[Any]
"""How another process finds memory: process, number of the file there, name."""


class Doorbell:
    """A lock, and a place to sleep until something has changed, used like a ``threading.Condition``.

    Where memory can be shared, other processes of the host ring too: each ring leaves a number that nobody has left
    before, so that who looks, and then sleeps while the number is the same, misses none. Elsewhere it is a condition.

    Attributes:
        look: called without the lock; takes what other processes have written, and returns whether there was anything.
        announced: how other processes find the memory; ``None`` if there is none.
        host: equal for processes that can share memory; empty if this one cannot.
    """

    def __init__(self, number: int) -> None:
        self.look: Callable[[], bool] = lambda: False
        self.announced: Announced | None = None
        self.host = ""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._handle: int | None = None
        self._bell: Bell | None = None
        if ordering.possible() and (host := sharing_id()):
            name = f"tfstyle-bell-{secrets.token_hex(8)}"
            try:
                self._handle = memory_file.create(name, mmap.PAGESIZE, reserve=True)
            except OSError:
                return
            self.host, self.announced = host, [os.getpid(), self._handle, name]
            self._bell = Bell(self._handle, number)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def notify_all(self) -> None:
        """Something has changed; the caller has the lock."""
        self._changed.notify_all() if self._bell is None else self._bell.ring()

    def wait(self, seconds: float) -> None:
        """Gives the lock up until something has changed, or about so long; the caller has it once."""
        if self._bell is None:
            self._changed.wait(seconds)
            return
        seen = self._bell.rung
        self._lock.release()
        try:
            if not self.look():
                self._bell.sleep(seen, self.look)
        finally:
            self._lock.acquire()

    def close(self) -> None:
        """Nobody else finds it any more."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle, self.announced = None, None


class Bell:
    """The memory of a doorbell, as its own process or another one sees it.

    Args:
        handle: the open file; the caller closes it.
        number: of the worker that rings, which is part of what it leaves.
    """

    def __init__(self, handle: int, number: int) -> None:
        memory = mmap.mmap(handle, mmap.PAGESIZE)
        self._words = memoryview(memory).cast("Q")
        self._futex = Futex(memory, _LIMIT_SECONDS)
        self._salt = (number & 0xFF) << 24
        self._count = 0
        self._ringing = threading.Lock()

    @classmethod
    def of(cls, announced: Announced, number: int) -> Bell:
        """That of another process.

        Raises:
            OSError: it cannot be opened.
        """
        process, file, name = announced
        handle = memory_file.find(process, file, str(name), mmap.PAGESIZE)
        try:
            return cls(handle, number)
        finally:
            os.close(handle)

    @property
    def rung(self) -> int:
        """What the last ring has left."""
        return self._words[_RUNG]

    def ring(self) -> None:
        """Wakes the process if it sleeps, or makes that it does not fall asleep before it has looked."""
        with self._ringing:
            self._count = self._count + 1 & 0xFFFFFF
            self._words[_RUNG] = self._salt | self._count
        ordering.fence()
        if self._words[_SLEEPS]:
            self._futex.wake(_RUNG)

    def sleep(self, seen: int, look: Callable[[], bool]) -> None:
        """Sleeps unless it was rung since ``seen``, then looks."""
        self._words[_SLEEPS] = 1
        ordering.fence()
        if self._words[_RUNG] == seen:
            self._futex.wait(_RUNG, seen)
        self._words[_SLEEPS] = 0
        look()
