"""Workers of one host meet in shared memory: no socket, no thread, and the sum in a fixed order.

Every worker has a slot. It copies its buffer there and says so; each worker then sums its own slice over all slots;
when all have, the result is copied back. Each meeting carries a digest of what the worker is about to do, so workers
that make different calls find out at once.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch

from tfstyle_dist.comm.group import SumInto
from tfstyle_dist.core.deadline import Deadline

DIRECTORY = Path("/dev/shm")
SLOT_BYTES = 8 * 1024 * 1024
_WORDS = 16  # of 8 bytes, for each worker: two cache lines
# The last two hold one word for even and one for odd meetings.
_ARRIVED, _DEPARTED, _LEFT, _DIGEST, _NUMBER = 0, 1, 2, 4, 6
_CONTROL_BYTES = 64 * 1024
_SPINS, _YIELDS, _NAP_SECONDS, _LOOK_SECONDS = 100, 2000, 0.0002, 0.1


class LaneError(RuntimeError):
    """A meeting did not come about: a worker is gone, or the time is up."""


def create_segment(size: int) -> str | None:
    """Makes the file that the workers map, readable by this user alone; ``None`` where that is not possible.

    Args:
        size: number of workers.
    """
    # Flags are written after the data with plain stores, which x86 keeps in order.
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux" or size * _WORDS * 8 > _CONTROL_BYTES:
        return None
    try:
        handle, path = tempfile.mkstemp(prefix="tfstyle-", dir=DIRECTORY)
        try:
            os.posix_fallocate(handle, 0, _CONTROL_BYTES + (size + 1) * SLOT_BYTES)
        except OSError:
            Path(path).unlink()
            return None
        finally:
            os.close(handle)
    except OSError:
        return None
    return path


def remove_segment(path: str | None) -> None:
    """Takes the name away; the memory goes with the last worker that maps it, however that ends."""
    if path is not None:
        with suppress(OSError):
            Path(path).unlink()


class SharedLane:
    """All-reduce and comparison between the workers of one host.

    Args:
        path: the segment, made by one worker with ``create_segment``.
        rank: this worker.
        size: number of workers.
        timeout: limit of each wait.
        state_of: what can be seen of a worker's process, e.g. ``"dead"``.
        sum_into: writes the sum of tensors into another one, in a fixed order.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        size: int,
        timeout: timedelta | None,
        state_of: Callable[[int], str],
        sum_into: SumInto,
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._state_of, self._sum_into = state_of, sum_into
        handle = os.open(path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(handle, _CONTROL_BYTES + (size + 1) * SLOT_BYTES)
        finally:
            os.close(handle)
        self._words = memoryview(self._memory).cast("q")
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)[_CONTROL_BYTES:].view(size + 1, SLOT_BYTES)
        self._meeting = 0

    def compare(self, digest: int, number: int = 0) -> tuple[bool, list[int]]:
        """Meets the others.

        Args:
            digest: of what this worker is about to do, 0 to 2**62.
            number: told to the others.

        Returns:
            Whether all digests are equal, and the number of each worker.

        Raises:
            LaneError: a worker is gone, or did not come in time.
        """
        self._meeting += 1
        mine, turn = self.rank * _WORDS, self._meeting % 2
        self._words[mine + _DIGEST + turn] = digest
        self._words[mine + _NUMBER + turn] = number
        self._words[mine + _ARRIVED] = self._meeting
        self._wait(_ARRIVED)
        # A worker that is ahead writes the other turn's words: it cannot come to the next but one without us.
        places = [r * _WORDS + turn for r in range(self.size)]
        same = all(self._words[p + _DIGEST] == digest for p in places)
        return same, [self._words[p + _NUMBER] for p in places]

    def all_reduce(self, buffer: torch.Tensor, digest: int) -> bool:
        """Replaces ``buffer`` by the sum over the workers, in rank order.

        Args:
            buffer: flat, contiguous, on the CPU.
            digest: as in ``compare``.

        Returns:
            Whether all workers meant the same; if not, the buffer is as it was.
        """
        step = SLOT_BYTES // buffer.element_size()
        for start in range(0, max(buffer.numel(), 1), step):
            part = buffer[start : start + step]
            slots = self._bytes.view(buffer.dtype)[:, : part.numel()]
            slots[self.rank].copy_(part)
            if not self.compare(digest)[0]:
                return False
            low, high = (part.numel() * r // self.size for r in (self.rank, self.rank + 1))
            if high > low:
                self._sum_into([slots[r, low:high] for r in range(self.size)], slots[self.size, low:high])
            self._words[self.rank * _WORDS + _DEPARTED] = self._meeting
            self._wait(_DEPARTED)
            part.copy_(slots[self.size])
        return True

    def leave(self) -> None:
        """Tells the others not to wait for this worker any more."""
        self._words[self.rank * _WORDS + _LEFT] = 1

    def _wait(self, word: int) -> None:
        """Returns when all workers have come to this meeting; naps only after a while, to stay quick and fair."""
        for rank in range(self.size):
            place, polls, looked, deadline = rank * _WORDS + word, 0, 0.0, None
            while self._words[place] < self._meeting:
                polls += 1
                if polls <= _SPINS:
                    continue
                if polls <= _YIELDS:
                    os.sched_yield()
                    continue
                time.sleep(_NAP_SECONDS)
                deadline = deadline or Deadline(self.timeout)
                if time.monotonic() - looked > _LOOK_SECONDS:
                    looked = time.monotonic()
                    self._look_after(rank, place, deadline)

    def _look_after(self, rank: int, place: int, deadline: Deadline) -> None:
        gone = self._words[rank * _WORDS + _LEFT] == 1 or self._state_of(rank) == "dead"
        if self._words[place] >= self._meeting:
            return  # it came just before it left
        if gone:
            raise LaneError(f"worker {rank} has left")
        if deadline.passed():
            raise LaneError(f"timed out after {deadline} waiting for worker {rank}")
