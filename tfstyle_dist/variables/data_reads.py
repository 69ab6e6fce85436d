"""Who asks a parameter for its ``.data``, or sets it: what is written there leaves no mark on the parameter."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from tfstyle_dist.core.process_hooks import DataPatch


class Reader(Protocol):
    """Who wants to know."""

    def data_is_read(self, parameter: torch.Tensor) -> None:
        """Somebody has a parameter's ``data`` now, and may write there."""


readers: weakref.WeakSet[Reader] = weakref.WeakSet()
"""The contents of the strategies; each gets the parameters that may have been written to."""


def _notice(parameter: torch.Tensor) -> None:
    for reader in readers:
        reader.data_is_read(parameter)


data_reads = DataPatch(_notice)
"""Installed while a strategy with contents lives."""
