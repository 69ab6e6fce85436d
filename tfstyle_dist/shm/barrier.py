"""A barrier for the processes of one host: words in shared memory, with no socket and no thread.

Each process has a row of words. It writes there how many barriers it has come to, and a digest of what it is about to
do, so that processes that do different things find out at once. Who waits looks for a while, then sleeps at a common
word (a futex), where the last one to come wakes all.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.shm.futex import Futex
from tfstyle_dist.shm.ordering import fence

BYTES = 64 * 1024
"""How much memory a barrier takes."""
_WORDS = 16  # of 8 bytes, for each process: two cache lines
# The last two hold one word for even and one for odd barriers.
_ARRIVED, _LEFT, _SLEEPS, _DIGEST, _NUMBER = 0, 1, 2, 4, 6
MOST_PROCESSES = BYTES // (_WORDS * 8) - 1  # after their words comes one at which those sleep who wait
_SPINS, _NAP_SECONDS, _LOOK_SECONDS = 200, 0.002, 0.1


class BarrierError(RuntimeError):
    """A process is gone, or the time is up."""


class Barrier:
    """Where processes wait for each other; they may come as often as they like.

    Args:
        memory: a shared mapping that begins with ``BYTES`` bytes for the barrier, which nobody has written yet.
        rank: this process, from 0.
        size: number of processes, ``MOST_PROCESSES`` at most.
        timeout: limit of each wait; ``None``: there is none.
        is_gone: whether a process has ended.

    Attributes:
        count: how many barriers this process has come to.
        crowded: whether there are more processes than processors: who waits for a processor that it keeps busy itself
            waits long.
        waited: seconds that this process has waited for others, in all.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, size: int, timeout: timedelta | None, is_gone: Callable[[int], bool]
    ) -> None:
        self.rank, self.size, self.timeout, self.count = rank, size, timeout, 0
        self.waited = 0.0
        self.crowded = size > len(os.sched_getaffinity(0))
        self._is_gone = is_gone
        self._words = memoryview(memory)[:BYTES].cast("q")
        self._futex = Futex(memory, _NAP_SECONDS)
        self._others = [r for r in range(size) if r != rank]
        self._spins = 0 if self.crowded else _SPINS

    def offsets(self, rank: int) -> list[int]:
        """For compiled code: where a process has its count, its two digests, and whether it sleeps; in bytes."""
        return [8 * (rank * _WORDS + word) for word in (_ARRIVED, _DIGEST, _SLEEPS)]

    @property
    def sleep_offset(self) -> int:
        """For compiled code: where the word is at which processes sleep; in bytes."""
        return 8 * self.size * _WORDS

    def wait(self, digest: int) -> bool:
        """Waits until all processes have come.

        Args:
            digest: of what this process is about to do, 0 to 2**62.

        Returns:
            Whether all processes are about to do the same.

        Raises:
            BarrierError: a process is gone, or did not come in time.
        """
        self.count = count = self.count + 1
        words, mine, parity = self._words, self.rank * _WORDS, count % 2
        words[mine + _DIGEST + parity] = digest
        words[mine + _ARRIVED] = count
        fence()
        if self._missing() is None:
            self._wake_others()
        else:
            self.wait_for_others()
        # One that is ahead writes the words of the other parity: it cannot come to the next barrier but one without us.
        return all(words[r * _WORDS + _DIGEST + parity] == digest for r in self._others)

    def compare(self, digest: int, number: int = 0) -> tuple[bool, list[int]]:
        """As ``wait``, and tells the others a number.

        Returns:
            Whether all digests are equal, and the number of each process.
        """
        self._words[self.rank * _WORDS + _NUMBER + (self.count + 1) % 2] = number
        same, parity = self.wait(digest), self.count % 2
        return same, [self._words[r * _WORDS + _NUMBER + parity] for r in range(self.size)]

    def _wake_others(self) -> None:
        """Wakes those who sleep; the process that comes last does so for all."""
        words, last = self._words, self.size * _WORDS
        if any(words[r * _WORDS + _SLEEPS] for r in self._others):
            words[last] = self.count
            self._futex.wake(last)

    def wait_for_others(self) -> None:
        """Waits until all have come to the barrier that this process has come to.

        Raises:
            BarrierError: a process is gone, or did not come in time.
        """
        began = perf_counter()
        try:
            self._wait_for_others()
        finally:
            self.waited += perf_counter() - began

    def _wait_for_others(self) -> None:
        for _ in range(self._spins):
            if self._missing() is None:
                return
        words, last, sleeps = self._words, self.size * _WORDS, self.rank * _WORDS + _SLEEPS
        deadline, looked = Deadline(self.timeout), time.monotonic()
        words[sleeps] = 1
        fence()
        try:
            while True:
                seen = words[last]
                if (rank := self._missing()) is None:
                    return
                self._futex.wait(last, seen)
                if time.monotonic() - looked > _LOOK_SECONDS:
                    looked = time.monotonic()
                    self._look_after(rank, deadline)
        finally:
            words[sleeps] = 0

    def leave(self) -> None:
        """Tells the others not to wait for this process any more."""
        self._words[self.rank * _WORDS + _LEFT] = 1
        self._futex.wake(self.size * _WORDS)

    def _missing(self) -> int | None:
        """A process that has not come yet."""
        words, count = self._words, self.count
        return next((r for r in self._others if words[r * _WORDS + _ARRIVED] < count), None)

    def _look_after(self, rank: int, deadline: Deadline) -> None:
        gone = self._words[rank * _WORDS + _LEFT] == 1 or self._is_gone(rank)
        if self._words[rank * _WORDS + _ARRIVED] >= self.count:
            return  # it came just before it left
        if gone:
            raise BarrierError(f"worker {rank} of this host has left")
        if deadline.passed():
            raise BarrierError(f"timed out after {deadline} waiting for worker {rank} of this host")
