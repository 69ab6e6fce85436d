"""Types shared by several layers; Protocols where a lower layer needs to name a higher one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class CheckpointWriter(Protocol):
    """Writes logical names with full tensors, independent of the number of workers, replicas or servers.

    A checkpoint is a mapping of logical names to full tensors plus metadata (synchronization, aggregation, shards,
    optimizer state by parameter name, iterator position, RNG state, version); ``variables.logical_state`` makes it and
    takes it back. The writer itself comes with ``train.Checkpoint``.
    """

    def save(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> str:
        """Writes one checkpoint and returns its path."""

    def load(self, path: str) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
        """Reads a checkpoint back."""
