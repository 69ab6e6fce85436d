"""The transport of workers that share a host: meetings in shared memory, numbered as all operations of the group."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch

from tfstyle_dist.comm.collectives.flat import Add, Flat
from tfstyle_dist.comm.collectives.operations import Operation, Operations, name_of
from tfstyle_dist.comm.collectives.topology import Topology
from tfstyle_dist.comm.host_memory.compiled import FindSum
from tfstyle_dist.comm.host_memory.shared_lane import LaneError, SharedLane, create_segment
from tfstyle_dist.core.tracing import region
from tfstyle_dist.shm.memory_file import Presence, hand_out

# What travels through shared memory; other element types are rare and take the sockets.
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


class HostMemory:
    """The lane of this worker's host, with the translation of its errors. No call begins after the group is broken.

    Args:
        lane: the lane of this host.
        presence: this worker's.
        operations: the group's.
        for_all: whether all workers of the group are on this host.

    Attributes:
        lane: the lane; ``None`` after ``leave``.
        for_all: as given.
    """

    def __init__(self, lane: SharedLane, presence: Presence, operations: Operations, for_all: bool) -> None:
        self.lane: SharedLane | None = lane
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
            lane = None
            if handle is not None:
                with suppress(OSError, ValueError):
                    presence = Presence(handle, here.index(rank))
                    lane = SharedLane(handle, here.index(rank), len(here), timeout, presence.is_gone)
            if not all(gather(lane is not None, "shared memory is open")) or lane is None:
                return None
            failed.pop_all()
        return cls(lane, presence, operations, len(topology.hosts) == 1)

    def use_compiled(self, find_sum: FindSum) -> None:
        """See ``SharedLane``."""
        if self.lane is not None:
            self.lane.use_compiled(find_sum)

    def compare(self, digest: int, number: int, name: str) -> tuple[bool, list[int]]:
        """Whether all workers of the host have the same digest, and the number of each."""
        sequence = self._operations.begin()
        assert self.lane is not None
        try:
            with region("meet for", name):
                return self.lane.compare(digest, number)
        except LaneError as error:
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
        """Replaces the values by their sum; see ``SharedLane.all_reduce`` for the arguments and the result."""
        sequence = self._operations.begin()
        assert self.lane is not None
        try:
            with region("all_reduce in shared memory", name):
                return self.lane.all_reduce(values, digest, add, between, method)
        except LaneError as error:
            self._operations.fail(Operation(name, sequence, name_of(values.dtype), values.numel), error)

    def leave(self) -> None:
        """Tells the others not to wait for this worker any more."""
        if self.lane is not None:
            self.lane.leave()
            self.lane = None
            self._presence.leave()
