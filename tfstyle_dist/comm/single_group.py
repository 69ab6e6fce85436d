"""The group of one worker: every operation is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.comm.group import Done, Pending, WorkerGroup
from tfstyle_dist.core.enums import AggregationMethod


class SingleGroup(WorkerGroup):
    """One worker alone; nothing is sent and nothing is waited for."""

    def all_reduce_async(
        self, buffer: torch.Tensor, name: str, agreed: bool = False, method: int = AggregationMethod.DEFAULT
    ) -> Pending:
        """The sum over one worker is the buffer itself."""
        return Done()

    def all_gather(self, buffer: torch.Tensor, name: str) -> list[torch.Tensor]:
        """A list of the one buffer, copied."""
        return [buffer.clone()]

    def broadcast(self, buffer: torch.Tensor, source: int, name: str) -> None:
        """Nothing to do."""

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """A list of the one value."""
        return [value]

    def report_failure(self, reason: str) -> None:
        """Nobody listens."""

    def errored(self) -> Exception | None:
        """Never."""
        return None

    def members(self) -> Sequence[str]:
        """This process."""
        return ["this process"]

    def split(self, ranks: Sequence[Sequence[int]]) -> WorkerGroup:
        """A group of one stays one."""
        return self

    def abort(self) -> None:
        """Nothing to give up."""

    def close(self) -> None:
        """Nothing to free."""
