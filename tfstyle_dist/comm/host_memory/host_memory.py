"""The transport of workers that share a host: sums in shared memory, numbered as all operations of the group."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch

from tfstyle_dist.comm.collectives.flat import Add, Flat
from tfstyle_dist.comm.collectives.operations import Operation, Operations, name_of
from tfstyle_dist.comm.collectives.topology import Topology
from tfstyle_dist.comm.host_memory.compiled_sums import FindSum
from tfstyle_dist.comm.host_memory.shared_sums import SharedSums, create_segment
from tfstyle_dist.core.tracing import region
from tfstyle_dist.shm.barrier import BarrierError
from tfstyle_dist.shm.memory_file import Presence, hand_out

# What travels through shared memory; other element types are rare and take the sockets.
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


class HostMemory:
    """Sums in the memory of this worker's host, with its errors translated. No call begins once the group is broken.

    Args:
        sums: those of this host.
        presence: this worker's.
        operations: the group's.
        for_all: whether all workers of the group are on this host.

    Attributes:
        sums: as given; ``None`` after ``leave``.
        for_all: as given.
    """

    def __init__(self, sums: SharedSums, presence: Presence, operations: Operations, for_all: bool) -> None:
        self.sums: SharedSums | None = sums
        self._presence = presence
        self._operations, self.for_all = operations, for_all

    @classmethod
    def open(
        cls, operations: Operations, topology: Topology, gather: Callable[[Any, str], list[Any]]
    ) -> HostMemory | None:
        """Maps a segment for each host, if all workers can; it has no name, so nothing stays behind.

        Args:
            operations: the group's; its peers are known.
            topology: which workers share a host.
            gather: the values of all workers in rank order, with a name for messages; all workers come here.
        """
        rank, here, timeout = operations.rank, topology.neighbours(operations.rank), operations.timeout
        with ExitStack() as failed:
            made = create_segment(len(here)) if rank == here[0] else None
            if made is not None:
                failed.callback(os.close, made)
            handle = hand_out(made, rank, here, gather, timeout, "shared memory")
            if handle is not None and made is None:
                failed.callback(os.close, handle)
            sums = None
            if handle is not None:
                with suppress(OSError, ValueError):
                    presence = Presence(handle, here.index(rank))
                    sums = SharedSums(handle, here.index(rank), len(here), timeout, presence.is_gone)
            if not all(gather(sums is not None, "shared memory is open")) or sums is None:
                return None
            failed.pop_all()
        return cls(sums, presence, operations, len(topology.hosts) == 1)

    @property
    def waited(self) -> float:
        """Seconds that this worker has waited for others of its host, in all."""
        return self.sums.barrier.waited if self.sums is not None else 0.0

    def use_compiled(self, find_sum: FindSum) -> None:
        """See ``SharedSums``."""
        if self.sums is not None:
            self.sums.use_compiled(find_sum)

    def compare(self, digest: int, number: int, name: str) -> tuple[bool, list[int]]:
        """Whether all workers of the host have the same digest, and the number of each."""
        sequence = self._operations.begin()
        assert self.sums is not None
        try:
            with region("meet for", name):
                return self.sums.barrier.compare(digest, number)
        except BarrierError as error:
            self._operations.fail(Operation(name, sequence, "int64", 2), error)

    def all_reduce(
        self,
        values: Flat,
        digest: int,
        add: Add,
        between: Callable[[torch.Tensor], None] | None,
        method: int,
        name: str,
    ) -> bool:
        """Replaces the values by their sum; see ``SharedSums.all_reduce`` for the arguments and the result."""
        sequence = self._operations.begin()
        assert self.sums is not None
        try:
            with region("all_reduce in shared memory", name):
                return self.sums.all_reduce(values, digest, add, between, method)
        except BarrierError as error:
            self._operations.fail(Operation(name, sequence, name_of(values.dtype), values.numel), error)

    def leave(self) -> None:
        """Tells the others not to wait for this worker any more."""
        if self.sums is not None:
            self.sums.barrier.leave()
            self.sums = None
            self._presence.leave()
