"""Who asks a tensor for its ``.data``, or sets it: what is written there leaves no mark on the tensor."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from tfstyle_dist.core.process_hooks import DataPatch


class Reader(Protocol):
    """Who wants to know."""

    def data_is_read(self, tensor: torch.Tensor, data: torch.Tensor | None) -> None:
        """Somebody has a tensor's ``data`` now, and may write there; ``None``: has set it."""


readers: weakref.WeakSet[Reader] = weakref.WeakSet()
"""The contents of the strategies; each gets the tensors that may have been written to."""


def _notice(tensor: torch.Tensor, data: torch.Tensor | None) -> None:
    for reader in readers:
        reader.data_is_read(tensor, data)


data_reads = DataPatch(_notice)
"""Installed while a strategy with contents lives."""
