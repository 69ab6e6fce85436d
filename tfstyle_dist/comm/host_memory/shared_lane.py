"""Workers of one host meet in shared memory: no socket, no thread, and the sum in a fixed order.

Every worker has a slot. It copies a part of its values there and says so; then each worker sums over all slots, the
whole part where that is cheap, else a slice of it that the others copy back. Parts are small enough to stay in the
processor's cache. There are two slots for each worker, used in turn: one meeting for each part is enough. Each meeting
carries a digest of what the worker is about to do, so workers that make different calls find out at once.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch

from tfstyle_dist.comm.collectives.flat import Add, BufferView, Flat
from tfstyle_dist.comm.host_memory.compiled import Call, CompiledSums, FindSum, Places, Said
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.shm import memory_file, ordering
from tfstyle_dist.shm.futex import Futex
from tfstyle_dist.shm.ordering import fence

SLOT_BYTES = 512 * 1024  # what is still in the cache after the meeting, with the other slots beside it
_WORDS = 16  # of 8 bytes, for each worker: two cache lines
# The last two hold one word for even and one for odd meetings.
_ARRIVED, _LEFT, _SLEEPS, _DIGEST, _NUMBER = 0, 1, 2, 4, 6
_CONTROL_BYTES = 64 * 1024
_MOST_WORKERS = _CONTROL_BYTES // (_WORDS * 8)  # after their words comes one at which those sleep who wait
# Two workers read each other's slot as fast as a common result; of small parts, the second meeting costs more.
_WHOLE_WORKERS, _WHOLE_BYTES = 2, 64 * 1024
_SPINS, _NAP_SECONDS, _LOOK_SECONDS = 200, 0.002, 0.1
_LOOKS = 20000  # of compiled code, which looks more often in the same time


class LaneError(RuntimeError):
    """A meeting did not come about: a worker is gone, or the time is up."""


def segment_bytes(size: int) -> int:
    """How much memory this many workers share."""
    return _CONTROL_BYTES + 2 * (size + 1) * SLOT_BYTES


def create_segment(size: int) -> int | None:
    """Makes the memory that the workers map; ``None`` where that is not possible.

    Args:
        size: number of workers.

    Returns:
        The open file.
    """
    if not ordering.possible() or size >= _MOST_WORKERS:
        get_logger().info(
            "no shared memory between workers: it needs Linux on x86-64 and fewer than %d workers a host", _MOST_WORKERS
        )
        return None
    try:
        return memory_file.create("tfstyle-lane", segment_bytes(size), reserve=True)
    except OSError as error:
        get_logger().info("no shared memory between workers: %s", error)
        return None


class SharedLane:
    """All-reduce and comparison between the workers of one host.

    Args:
        handle: the open segment, made by one worker with ``create_segment``; the caller closes it.
        rank: this worker's number on the host.
        size: number of workers of the host.
        timeout: limit of each wait.
        is_gone: whether a worker's process has ended.
    """

    def __init__(
        self, handle: int, rank: int, size: int, timeout: timedelta | None, is_gone: Callable[[int], bool]
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._is_gone = is_gone
        self._memory = mmap.mmap(handle, segment_bytes(size))
        self._words = memoryview(self._memory).cast("q")
        self._futex = Futex(self._memory, _NAP_SECONDS)
        data = torch.frombuffer(self._memory, dtype=torch.uint8)[_CONTROL_BYTES:]
        self._data = data.view(2, size + 1, SLOT_BYTES)  # the last one is for the result
        self._slots: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._others = [r for r in range(size) if r != rank]
        # Who waits for a processor that it keeps busy itself waits long.
        crowded = size > len(os.sched_getaffinity(0))
        self._spins, self._looks = (0, 0) if crowded else (_SPINS, _LOOKS)
        self._meeting = 0
        self._compiled: CompiledSums | None = None

    def use_compiled(self, find: FindSum) -> None:
        """Says where to find the compiled form of sums; each worker may use it or not, at any time."""
        start = self._data.data_ptr() - _CONTROL_BYTES
        addresses = [
            [start + 8 * (rank * _WORDS + word) for word in (_ARRIVED, _DIGEST, _SLEEPS)]
            + [self._data[turn, rank].data_ptr() for turn in range(2)]
            for rank in range(self.size)
        ]
        results = [self._data[turn, self.size].data_ptr() for turn in range(2)]
        last = start + 8 * self.size * _WORDS
        self._compiled = CompiledSums(find, Places(addresses, results, last, self.rank, SLOT_BYTES))

    # ---- meetings ---------------------------------------------------------------------------------------------

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
        self._words[self.rank * _WORDS + _NUMBER + (self._meeting + 1) % 2] = number
        same = self._meet(digest)
        turn = self._meeting % 2
        return same, [self._words[r * _WORDS + _NUMBER + turn] for r in range(self.size)]

    def _meet(self, digest: int) -> bool:
        """Waits until all workers have come here; returns whether they mean the same."""
        self._meeting = meeting = self._meeting + 1
        words, mine, turn = self._words, self.rank * _WORDS, meeting % 2
        words[mine + _DIGEST + turn] = digest
        words[mine + _ARRIVED] = meeting
        fence()
        if self._missing() is None:
            self._wake()
        else:
            self._wait()
        # A worker that is ahead writes the other turn's words: it cannot come to the next but one without us.
        return all(words[r * _WORDS + _DIGEST + turn] == digest for r in self._others)

    def _missing(self) -> int | None:
        """A worker that did not come yet to the meeting that this one came to."""
        words, meeting = self._words, self._meeting
        return next((r for r in self._others if words[r * _WORDS + _ARRIVED] < meeting), None)

    def _wake(self) -> None:
        """Wakes those who sleep; the worker that comes last does so for all."""
        words, last = self._words, self.size * _WORDS
        if any(words[r * _WORDS + _SLEEPS] for r in self._others):
            words[last] = self._meeting
            self._futex.wake(last)

    def _wait(self) -> None:
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

    def _look_after(self, rank: int, deadline: Deadline) -> None:
        gone = self._words[rank * _WORDS + _LEFT] == 1 or self._is_gone(rank)
        if self._words[rank * _WORDS + _ARRIVED] >= self._meeting:
            return  # it came just before it left
        if gone:
            raise LaneError(f"worker {rank} of this host has left")
        if deadline.passed():
            raise LaneError(f"timed out after {deadline} waiting for worker {rank} of this host")

    def leave(self) -> None:
        """Tells the others not to wait for this worker any more."""
        self._words[self.rank * _WORDS + _LEFT] = 1
        self._futex.wake(self.size * _WORDS)

    # ---- sums -------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        values: Flat | torch.Tensor,
        digest: int,
        add: Add,
        between: Callable[[torch.Tensor], None] | None = None,
        method: int = AggregationMethod.ADD_N,
    ) -> bool:
        """Replaces the values by their sum over the workers, in rank order.

        Args:
            values: this worker's values, or a flat, contiguous tensor on the CPU.
            digest: as in ``compare``.
            add: writes the sum of tensors into another one.
            between: makes a slice of this host's sum that over all hosts, in place; the hosts have equally many workers
                and the worker of the same number there calls it for the same slice.
            method: the order in which ``add`` adds, for compiled sums.

        Returns:
            Whether all workers meant the same; if not, the values are as they were.

        Raises:
            LaneError: a worker is gone, or did not come in time.
        """
        flat = BufferView(values) if isinstance(values, torch.Tensor) else values
        small = flat.numel * flat.dtype.itemsize <= _WHOLE_BYTES
        if between is None and self._compiled is not None and (self.size <= _WHOLE_WORKERS or not small):
            call = self._compiled.call(flat, method, digest, self._meeting, self._looks)
            if call is not None:
                return self._run_compiled(call)
        if between is None and (self.size <= _WHOLE_WORKERS or small):
            return self._sum_whole(flat, digest, add)
        return self._sum_slices(flat, digest, add, between)

    def _slots_of(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """For each of the two turns the workers' slots and the place of the result, as tensors of a dtype."""
        if dtype not in self._slots:
            self._slots[dtype] = [list(turn.view(dtype).unbind()) for turn in self._data]
        return self._slots[dtype]

    def _sum_whole(self, flat: Flat, digest: int, add: Add) -> bool:
        step, slots = SLOT_BYTES // flat.dtype.itemsize, self._slots_of(flat.dtype)
        for start in range(0, max(flat.numel, 1), step):
            stop = min(start + step, flat.numel)
            turn = self._meeting % 2
            flat.read(start, stop, slots[turn][self.rank], lasting=True)
            if not self._meet(digest):
                return False
            flat.write(start, stop, slots[turn][: self.size], add, self.rank)
        return True

    def _run_compiled(self, call: Call) -> bool:
        """As ``_sum_whole`` or ``_sum_slices``, part by part and meeting by meeting."""
        while (said := call.go_on()) != Said.DONE:
            self._meeting = call.meeting
            if said == Said.DIFFERS:
                return False
            if said == Said.WAKES:
                self._wake()
            else:
                self._wait()
        self._meeting = call.meeting
        return True

    def _sum_slices(
        self, flat: Flat, digest: int, add: Add, between: Callable[[torch.Tensor], None] | None = None
    ) -> bool:
        """A part goes through three stages, each between two meetings: copied in, summed in slices, copied back."""
        step, slots = SLOT_BYTES // flat.dtype.itemsize, self._slots_of(flat.dtype)
        bounds = [(s, min(s + step, flat.numel)) for s in range(0, max(flat.numel, 1), step)]
        turns: list[int] = []
        for stage in range(len(bounds) + 2):
            if stage < len(bounds):
                turns.append(self._meeting % 2)
                flat.read(*bounds[stage], slots[turns[-1]][self.rank], lasting=True)
            if 0 <= stage - 1 < len(bounds):
                start, stop = bounds[stage - 1]
                parts = slots[turns[stage - 1]]
                low, high = ((stop - start) * r // self.size for r in (self.rank, self.rank + 1))
                if high > low:
                    add([p[low:high] for p in parts[: self.size]], parts[self.size][low:high])
                    if between is not None:
                        between(parts[self.size][low:high])
            if stage >= 2:
                flat.write(*bounds[stage - 2], slots[turns[stage - 2]][self.size :], add)
            if stage <= len(bounds) and not self._meet(digest):
                return False
        return True
