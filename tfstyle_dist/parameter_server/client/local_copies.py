"""The local copies of tensors on parameter servers: where pulled bytes go, and placeholders."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.parameter_server.client.outdated import has_changed, make_current
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord, parts_by_shard


@dataclass(slots=True)
class Ahead:
    """Shards that were asked for ahead.

    Attributes:
        step: in which they may be used.
        parts: by index: version and elements; no elements: as the local copy.
    """

    step: int
    parts: dict[int, tuple[int, torch.Tensor | None]] = field(default_factory=dict)


class Pull:
    """Puts the shards of one answer into the local copy, or into a new one if the old one may be in use."""

    def __init__(self, record: RemoteRecord, steps: int | None, watch: bool) -> None:
        self._record, self._steps, self._watch = record, steps, watch
        local = record.components[0]
        if has_changed(record):
            record.forget()
        same_step = steps is None or record.written
        self._target: torch.Tensor | None = None
        self.versions: dict[int, int] = {}
        self._fresh = not record.fixed and (same_step or is_placeholder(local))
        self._local = local
        self._owner: Any = None
        # A leased copy is left to the server, unless rows were picked from it: their gradients refer to it.
        own = record.leased is None or record.looked_up == steps
        self._in_place = not self._fresh and own and local.is_cpu
        if self._fresh and steps is not None and record.looked_up == steps:
            raise RuntimeError(
                f"A function picks rows of {record.describe()!r} and reads the whole of it too: the gradients of the "
                "rows would be lost. Read the whole first, or only rows."
            )

    @property
    def may_lease(self) -> bool:
        """Whether the local copy may be the server's own memory: in a function, of a whole tensor."""
        record = self._record
        whole = len(record.shards) == 1 and record.kind != "buffer"
        return whole and self._steps is not None and record.looked_up != self._steps

    @property
    def may_replace(self) -> bool:
        """Whether ``adopt`` may put a new tensor in the place of the local copy's memory."""
        return not self._in_place and len(self._record.shards) == 1

    def adopt(self, data: torch.Tensor, version: int, owner: Any) -> None:
        """The local copy is another tensor from now on.

        Args:
            data: with its dtype and shape.
            version: of the value.
            owner: whose memory that is, if it is the server's; ``None``: new memory.
        """
        self._target = data
        self._owner, self._in_place, self.versions[0] = owner, False, version

    def target(self, index: int, version: int) -> torch.Tensor:
        """The flat bytes that one shard's go into."""
        self.versions[index] = version
        return self.part(index).view(-1).view(torch.uint8)

    def part(self, index: int) -> torch.Tensor:
        """The elements that one shard's go into; if it is the only one, in the tensor's shape."""
        if self._target is None:
            local = self._local.detach()
            if self._in_place:
                self._target = local
            else:
                self._target = torch.empty(local.shape, dtype=local.dtype)
                if len(self._record.shards) > 1:
                    self._target.copy_(local)
        return parts_by_shard(self._record, self._target)[index][1]

    def done(self) -> None:
        """The local copy is as fresh as the servers were."""
        record = self._record
        if self._target is not None and not self._in_place:
            if self._fresh:
                old, record.components[0] = record.components[0], renewed(record.components[0], self._target)
                if self._steps is None and old.requires_grad:
                    hand_over_gradients(old, record)
            else:
                record.components[0].data = self._target.to(self._local.device)  # a function may have moved it
            record.leased = self._owner
        for index, version in self.versions.items():
            record.versions[index] = version
        if self._steps is not None:
            record.stamp = self._steps
        record.written = False
        record.settle(record.kind == "buffer" or (record.fixed and (self._watch or record.put_back)))
        make_current(record.components[0])


def renewed(old: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A leaf like ``old`` with other data, and the program's hooks."""
    fresh = data.as_subclass(type(old)) if type(old) is not torch.nn.Parameter else torch.nn.Parameter(data, False)
    for name, hooks in zip(torch_internals.HOOKS, torch_internals.hooks_of(old), strict=True):
        if hooks:  # the same dict: handles that remove refer to it
            setattr(fresh.requires_grad_(), name, hooks)
    if later := torch_internals.hooks_of(old)[1]:
        setattr(old, torch_internals.HOOKS[1], later.copy())  # for graphs that are there; see hand_over_gradients
    fresh.requires_grad_(old.requires_grad)
    for name, value in old.__dict__.items():
        if name.startswith("_tfstyle"):
            fresh.__dict__[name] = value
    return fresh


def adopted(parameter: torch.nn.Parameter, data: torch.Tensor) -> torch.Tensor:
    """The local copy of a parameter that the servers take over, with the hooks and the gradient that it has by then."""
    fresh = renewed(parameter, data)
    fresh.grad, parameter.grad = parameter.grad, None
    return fresh


def hand_over_gradients(old: torch.Tensor, record: RemoteRecord) -> None:
    """The gradient of a copy that was replaced is that of the new one, also what graphs made with it bring later.

    Outside of functions a program may read before and after a value has changed, and take one gradient of both.
    """
    record.components[0].grad, old.grad = old.grad, None
    known = weakref.ref(record)

    def pass_on(leaf: torch.Tensor) -> None:
        gradient, leaf.grad, kept = leaf.grad, None, known()
        if kept is None or gradient is None:
            return
        current = kept.components[0]
        if current.grad is None:
            current.grad = gradient
        else:  # torch adds rows to a whole tensor, not the other way round
            current.grad = gradient + current.grad if current.grad.is_sparse else current.grad + gradient

    old.register_post_accumulate_grad_hook(pass_on)


def give_back(record: RemoteRecord) -> None:
    """Before a write: a local copy that is the server's memory is not needed any more, unless the function holds it.

    The next read pulls; the server can write in place.
    """
    local = record.components[0]
    if record.leased is None or record.fixed or local.grad is not None or record.looked_up == record.stamp:
        return
    owner, record.leased = record.leased, None
    record.components[0] = renewed(local, placeholder(local.shape, local.dtype))
    record.forget()
    del local
    owner.sweep()


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a shape without its memory: stands for a local copy until the whole tensor is pulled."""
    if math.prod(shape) <= 1:
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.zeros((), dtype=dtype).expand(tuple(shape))


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of ``placeholder``."""
    return tensor.numel() > 1 and 0 in tensor.stride()
