"""A group whose peers are imagined: for tests of a large world on one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.comm.group import Done, Pending, WorkerGroup
from tfstyle_dist.core.enums import AggregationMethod


class FakeGroup(WorkerGroup):
    """Behaves as if all ``size`` workers held the same values as this one; records every operation.

    Args:
        rank: which worker this process plays.
        size: how many workers there are said to be.

    Attributes:
        log: ``(operation, name, numel)`` of every call in order.
    """

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} does not fit a group of {size}: it counts from 0 to {size - 1}.")
        self.rank, self.size = rank, size
        self.log: list[tuple[str, str, int]] = []
        self._error: Exception | None = None

    def _record(self, operation: str, name: str, buffer: torch.Tensor) -> None:
        if self._error is not None:
            raise self._error
        self.log.append((operation, name, buffer.numel()))

    def all_reduce_async(
        self, buffer: torch.Tensor, name: str, agreed: bool = False, method: int = AggregationMethod.DEFAULT
    ) -> Pending:
        """Multiplies by the number of workers."""
        self._record("all_reduce", name, buffer)
        buffer.mul_(self.size)
        return Done()

    def all_gather(self, buffer: torch.Tensor, name: str) -> list[torch.Tensor]:
        """One copy for each worker."""
        self._record("all_gather", name, buffer)
        return [buffer.clone() for _ in range(self.size)]

    def reduce_scatter(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """This worker's slice of the sum."""
        self._record("reduce_scatter", name, buffer)
        return buffer.view(self.size, -1)[self.rank] * self.size

    def broadcast(self, buffer: torch.Tensor, source: int, name: str) -> None:
        """All hold the same already."""
        self._record("broadcast", name, buffer)

    def send(self, buffer: torch.Tensor, to: int, name: str) -> None:
        """Dropped."""
        self._record("send", name, buffer)

    def recv(self, buffer: torch.Tensor, source: int, name: str) -> None:
        """Leaves the buffer as it is."""
        self._record("recv", name, buffer)

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """The same value from everybody."""
        return [value] * self.size

    def report_failure(self, reason: str) -> None:
        """Kept in the log."""
        self.log.append(("failure", reason, 0))

    def errored(self) -> Exception | None:
        """The error given to ``abort``, if any."""
        return self._error

    def members(self) -> Sequence[str]:
        """Imagined peers."""
        return [f"fake worker {r}" for r in range(self.size)]

    def split(self, ranks: Sequence[Sequence[int]]) -> WorkerGroup:
        """A fake group of the part that holds this rank."""
        part = next(r for r in ranks if self.rank in r)
        return FakeGroup(list(part).index(self.rank), len(part))

    def abort(self) -> None:
        """Later operations raise."""
        self._error = RuntimeError("the group was aborted")

    def close(self) -> None:
        """Nothing to free."""
