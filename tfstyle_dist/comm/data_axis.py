"""Workers in a grid: several hold the parts of one replica, and each part is there once for each replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.comm.collectives.flat import Flat
from tfstyle_dist.comm.group import Pending, SumInto, WorkerGroup
from tfstyle_dist.comm.host_memory.compiled_sums import FindSum, nothing_compiled
from tfstyle_dist.comm.single_group import SingleGroup
from tfstyle_dist.core.enums import AggregationMethod


class DataAxis(WorkerGroup):
    """The workers that hold the same part of different replicas.

    What is exchanged travels between the same parts. What the replicas decide, and what they start from, is the same on
    all parts: part 0's.

    Args:
        world: all workers; consecutive ones hold the parts of one replica. Closed with this group.
        parts: how many workers hold a replica.

    Attributes:
        model: the workers that hold this replica.

    Raises:
        ValueError: the workers do not divide into replicas.
    """

    def __init__(self, world: WorkerGroup, parts: int) -> None:
        if parts < 1 or world.size % parts:
            raise ValueError(
                f"logical_devices_per_replica={parts} does not divide the {world.size} worker(s). Start a multiple of "
                f"{parts} processes."
            )
        self.world, self.rank, self.size, self.timeout = world, world.rank // parts, world.size // parts, world.timeout
        replicas = [list(range(first, first + parts)) for first in range(0, world.size, parts)]
        self.model = world.split(replicas)
        self.data: WorkerGroup = SingleGroup()
        if self.size > 1:
            self.data = world.split([list(range(part, world.size, parts)) for part in range(parts)])
        self.leads = self.model.rank == 0

    @property
    def everyone(self) -> WorkerGroup:
        return self.world

    def use_summation(self, sum_into: SumInto, find_sum: FindSum = nothing_compiled) -> None:
        for group in (self.world, self.model, self.data):
            group.use_summation(sum_into, find_sum)

    # ---- between the same parts -------------------------------------------------------------------------------

    def all_reduce_async(
        self, buffer: torch.Tensor, name: str, agreed: bool = False, method: int = AggregationMethod.DEFAULT
    ) -> Pending:
        return self.data.all_reduce_async(buffer, name, agreed, method)

    def all_reduce(self, buffer: torch.Tensor, name: str, method: int = AggregationMethod.DEFAULT) -> None:
        self.data.all_reduce(buffer, name, method)

    def all_reduce_flat(self, values: Flat, name: str, method: int = AggregationMethod.DEFAULT) -> None:
        self.data.all_reduce_flat(values, name, method)

    def all_reduce_variant(self, values: Flat, name: str, method: int, variant: int, call: str) -> bool:
        return self.data.all_reduce_variant(values, name, method, variant, call)

    @property
    def waited(self) -> float:
        return self.data.waited

    def shares_memory(self, dtype: torch.dtype, device: torch.device) -> bool:
        return self.data.shares_memory(dtype, device)

    def backend_of(self, device: torch.device) -> str:
        return self.data.backend_of(device)

    def explain(self, numel: int, dtype: torch.dtype, method: int = AggregationMethod.DEFAULT) -> str:
        return self.data.explain(numel, dtype, method)

    def all_gather(self, buffer: torch.Tensor, name: str) -> list[torch.Tensor]:
        return self.data.all_gather(buffer, name)

    def agree(self, signature: str, name: str) -> None:
        self.data.agree(signature, name)

    def broadcast_part(self, buffer: torch.Tensor, source: int, name: str) -> None:
        """See ``WorkerGroup``: each part its own."""
        self.data.broadcast(buffer, source, name)

    # ---- the same on all parts --------------------------------------------------------------------------------

    def broadcast(self, buffer: torch.Tensor, source: int, name: str) -> None:
        """See ``WorkerGroup``: part 0's on all."""
        self.data.broadcast(buffer, source, name)
        self.model.broadcast(buffer, 0, name)

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """See ``WorkerGroup``: what the parts 0 say."""
        found: list[Any] = self.model.gather_objects(self.data.gather_objects(value, name), name)[0]
        return found

    # ---- life -------------------------------------------------------------------------------------------------

    def report_failure(self, reason: str) -> None:
        for group in (self.world, self.model, self.data):
            group.report_failure(reason)

    def errored(self) -> Exception | None:
        return self.data.errored() or self.model.errored() or self.world.errored()

    def members(self) -> Sequence[str]:
        return self.data.members() if self.size > 1 else ["this process"]

    def split(self, ranks: Sequence[Sequence[int]]) -> WorkerGroup:
        """See ``WorkerGroup``: the same parts of some replicas."""
        return self.data.split(ranks)

    def abort(self) -> None:
        for group in (self.data, self.model, self.world):
            group.abort()

    def close(self) -> None:
        for group in (self.data, self.model, self.world):
            group.close()
