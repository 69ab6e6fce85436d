"""Sums between the workers of one host in shared memory, in a fixed order.

Every worker has two staging areas, used in turn: one barrier for each part is enough. It copies a part of its values
there and comes to the barrier; then each worker sums over the areas of all, the whole part where that is cheap, else a
slice of it that the others copy back. Parts are small enough to stay in the processor's cache.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from datetime import timedelta

import torch

from tfstyle_dist.comm.collectives.flat import Add, BufferView, Flat
from tfstyle_dist.comm.host_memory.compiled_sums import Addresses, Call, CompiledSums, FindSum, Said
from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.shm import barrier, memory_file, ordering
from tfstyle_dist.shm.barrier import Barrier

STAGING_BYTES = 512 * 1024  # what is still in the cache after the barrier, with the areas of the others beside it
# Two workers read each other's area as fast as a common result; of small parts, the second barrier costs more.
_WHOLE_WORKERS, _WHOLE_BYTES = 2, 64 * 1024
_LOOKS = 20000  # of compiled code, which looks for the others so often before it counts them as late


def segment_bytes(size: int) -> int:
    """How much memory this many workers share."""
    return barrier.BYTES + 2 * (size + 1) * STAGING_BYTES


def create_segment(size: int) -> int | None:
    """Makes the memory that the workers map; ``None`` where that is not possible.

    Args:
        size: number of workers.

    Returns:
        The open file.
    """
    if not ordering.possible() or size > barrier.MOST_PROCESSES:
        get_logger().info(
            "no shared memory between workers: it needs Linux on x86-64 and at most %d workers a host",
            barrier.MOST_PROCESSES,
        )
        return None
    try:
        return memory_file.create("tfstyle-workers", segment_bytes(size), reserve=True)
    except OSError as error:
        get_logger().info("no shared memory between workers: %s", error)
        return None


class SharedSums:
    """All-reduce between the workers of one host.

    Args:
        handle: the open segment, made by one worker with ``create_segment``; the caller closes it.
        rank: this worker's number on the host.
        size: number of workers of the host.
        timeout: limit of each wait.
        is_gone: whether a worker's process has ended.

    Attributes:
        barrier: where the workers wait for each other.
    """

    def __init__(
        self, handle: int, rank: int, size: int, timeout: timedelta | None, is_gone: Callable[[int], bool]
    ) -> None:
        self.rank, self.size = rank, size
        memory = mmap.mmap(handle, segment_bytes(size))
        self.barrier = Barrier(memory, rank, size, timeout, is_gone)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._staging = self._memory[barrier.BYTES :].view(2, size + 1, STAGING_BYTES)  # the last is for the result
        self._typed: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        self._looks = 0 if self.barrier.crowded else _LOOKS
        self._compiled: CompiledSums | None = None

    def use_compiled(self, find: FindSum) -> None:
        """Says where to find the compiled form of sums; each worker may use it or not, at any time."""
        start = self._memory.data_ptr()
        addresses = [
            [start + offset for offset in self.barrier.offsets(rank)]
            + [self._staging[parity, rank].data_ptr() for parity in range(2)]
            for rank in range(self.size)
        ]
        results = [self._staging[parity, self.size].data_ptr() for parity in range(2)]
        where = Addresses(addresses, results, start + self.barrier.sleep_offset, self.rank, STAGING_BYTES)
        self._compiled = CompiledSums(find, where)

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
            digest: of what this worker is about to do, 0 to 2**62.
            add: writes the sum of tensors into another one.
            between: makes a slice of this host's sum that over all hosts, in place; the hosts have equally many workers
                and the worker of the same number there calls it for the same slice.
            method: the order in which ``add`` adds, for compiled sums.

        Returns:
            Whether all workers meant the same; if not, the values are as they were.

        Raises:
            BarrierError: a worker is gone, or did not come in time.
        """
        flat = BufferView(values) if isinstance(values, torch.Tensor) else values
        small = flat.numel * flat.dtype.itemsize <= _WHOLE_BYTES
        if between is None and self._compiled is not None and (self.size <= _WHOLE_WORKERS or not small):
            call = self._compiled.call(flat, method, digest, self.barrier.count, self._looks)
            if call is not None:
                return self._run_compiled(call)
        if between is None and (self.size <= _WHOLE_WORKERS or small):
            return self._sum_whole(flat, digest, add)
        return self._sum_slices(flat, digest, add, between)

    def _staging_of(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """For even and odd barriers the workers' areas and that of the result, as tensors of a dtype."""
        if dtype not in self._typed:
            self._typed[dtype] = [list(areas.view(dtype).unbind()) for areas in self._staging]
        return self._typed[dtype]

    def _sum_whole(self, flat: Flat, digest: int, add: Add) -> bool:
        step, staging = STAGING_BYTES // flat.dtype.itemsize, self._staging_of(flat.dtype)
        for start in range(0, max(flat.numel, 1), step):
            stop = min(start + step, flat.numel)
            parity = self.barrier.count % 2
            flat.read(start, stop, staging[parity][self.rank], lasting=True)
            if not self.barrier.wait(digest):
                return False
            flat.write(start, stop, staging[parity][: self.size], add, self.rank)
        return True

    def _run_compiled(self, call: Call) -> bool:
        """As ``_sum_whole`` or ``_sum_slices``, part by part and barrier by barrier."""
        while (said := call.go_on()) != Said.DONE:
            self.barrier.count = call.count
            if said == Said.DIFFERS:
                return False
            self.barrier.wait_for_others()
        self.barrier.count = call.count
        return True

    def _sum_slices(
        self, flat: Flat, digest: int, add: Add, between: Callable[[torch.Tensor], None] | None = None
    ) -> bool:
        """A part goes through three stages, each between two barriers: copied in, summed in slices, copied back."""
        step, staging = STAGING_BYTES // flat.dtype.itemsize, self._staging_of(flat.dtype)
        bounds = [(s, min(s + step, flat.numel)) for s in range(0, max(flat.numel, 1), step)]
        parities: list[int] = []
        for stage in range(len(bounds) + 2):
            if stage < len(bounds):
                parities.append(self.barrier.count % 2)
                flat.read(*bounds[stage], staging[parities[-1]][self.rank], lasting=True)
            if 0 <= stage - 1 < len(bounds):
                start, stop = bounds[stage - 1]
                parts = staging[parities[stage - 1]]
                low, high = ((stop - start) * r // self.size for r in (self.rank, self.rank + 1))
                if high > low:
                    add([p[low:high] for p in parts[: self.size]], parts[self.size][low:high])
                    if between is not None:
                        between(parts[self.size][low:high])
            if stage >= 2:
                flat.write(*bounds[stage - 2], staging[parities[stage - 2]][self.size :], add)
            if stage <= len(bounds) and not self.barrier.wait(digest):
                return False
        return True
