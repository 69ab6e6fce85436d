"""The local copies of tensors on parameter servers: where pulled bytes go, and placeholders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tfstyle_dist.parameter_server.remote import RemoteRecord


class Pull:
    """Puts the shards of one answer into the local copy, or into a new one if the old one may be in use."""

    def __init__(self, record: RemoteRecord, steps: int | None) -> None:
        self._record, self._steps = record, steps
        local = record.components[0]
        same_step = steps is None or record.written
        self._target: torch.Tensor | None = None
        self.versions: dict[int, int] = {}
        self._fresh = not record.fixed and (same_step or is_placeholder(local))
        self._local = local
        if self._fresh and steps is not None and record.looked_up == steps:
            raise RuntimeError(
                f"A function picks rows of {record.describe()!r} and reads the whole of it too: the gradients of the "
                "rows would be lost. Read the whole first, or only rows."
            )

    def target(self, place: int, version: int) -> torch.Tensor:
        """The flat bytes that one shard's go into."""
        if self._target is None:
            local = self._local.detach()
            if not self._fresh:
                self._target = local
            else:
                self._target = torch.empty(local.shape, dtype=local.dtype)
                if len(self._record.shards) > 1:
                    self._target.copy_(local)
        shard = self._record.shards[place]
        self.versions[place] = version
        return self._target.view(-1)[shard.offset : shard.offset + shard.numel].view(torch.uint8)

    def done(self) -> None:
        """The local copy is as fresh as the servers were."""
        record = self._record
        for place, version in self.versions.items():
            record.versions[place] = version
        if self._target is not None and self._fresh:
            old = record.components[0]
            record.components[0] = renewed(old, self._target)
        if self._steps is not None:
            record.stamp = self._steps
        record.written = False
        if record.kind == "buffer":
            record.baseline = record.components[0].detach().clone()


def renewed(old: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A leaf like ``old`` with other data."""
    fresh = data.as_subclass(type(old)) if type(old) is not torch.nn.Parameter else torch.nn.Parameter(data, False)
    fresh.requires_grad_(old.requires_grad)
    for name, value in old.__dict__.items():
        if name.startswith("_tfstyle"):
            fresh.__dict__[name] = value
    return fresh


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a shape without its memory: stands for a local copy until the whole tensor is pulled."""
    if math.prod(shape) <= 1:
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.zeros((), dtype=dtype).expand(tuple(shape))


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of ``placeholder``."""
    return tensor.numel() > 1 and 0 in tensor.stride()
