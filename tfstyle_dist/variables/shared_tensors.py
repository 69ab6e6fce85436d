"""Tensors that all replicas of a process share: a step that writes to one writes to it once for each replica."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.logging import warn_once


class SharedTensors:
    """Says it, once, if a step writes to tensors that all replicas share."""

    def __init__(self) -> None:
        self._watched: list[tuple[torch.Tensor, int]] = []

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remembers how often each tensor was written to so far."""
        self._watched = [(t, torch_internals.version_of(t)) for t in tensors if not t.is_inference()]

    def say_written(self) -> None:
        """Says which of them were written to since, and forgets them."""
        for tensor, version in self._watched:
            if torch_internals.version_of(tensor) != version:
                warn_once(
                    f"shared tensor {id(self)} {tuple(tensor.shape)}",
                    f"A step function wrote to a tensor of shape {tuple(tensor.shape)} that it names (in its closure, "
                    "a global or a container) and that no module or optimizer holds. The replicas of one process share "
                    "it, so each of them wrote to the same values. If each should have its own, as processes would, "
                    "call strategy.experimental_adopt(tensor), or make it a buffer of a module (docs/replicas.md).",
                )
        self._watched = []
