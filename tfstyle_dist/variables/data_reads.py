"""Who asks a parameter for its ``.data``, or sets it: what is written there leaves no mark on the parameter."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from tfstyle_dist.core.process_hooks import DataPatch


class Reader(Protocol):
    """Who wants to know."""

    active: int | None
    dirty: set[int]


readers: weakref.WeakSet[Reader] = weakref.WeakSet()
"""The contents of the strategies; each gets the ids of parameters that may have been written to between its runs."""


def _notice(parameter: torch.Tensor) -> None:
    for reader in readers:
        if reader.active is None:
            reader.dirty.add(id(parameter))


data_reads = DataPatch(_notice)
"""Installed while a strategy with contents lives."""
