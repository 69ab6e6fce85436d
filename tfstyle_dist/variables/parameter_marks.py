"""How a parameter is seen to have changed: what is remembered of it, without its values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch

from tfstyle_dist.core import torch_internals

Hooks = tuple[Any, ...]
_ATTRIBUTES = attrgetter(*torch_internals.HOOKS, "__dict__")
_PLAIN: tuple[Any, ...] = (None, None, {})


def address_of(parameter: torch.Tensor) -> Any:
    """Where the values are in memory."""
    return parameter.data_ptr() if parameter.layout is torch.strided else None


def marks_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """What is remembered of one parameter."""
    grad = parameter.grad
    version = 0 if grad is None else torch_internals.version_of(grad)
    attributes = dict(parameter.__dict__) if parameter.__dict__ else None
    written, trains = torch_internals.version_of(parameter), parameter.requires_grad
    return written, address_of(parameter), trains, grad, version, hooks_of(parameter), attributes


def marks_of_all(parameters: Sequence[torch.Tensor]) -> tuple[list[tuple[Any, ...]], list[Any] | None]:
    """The marks of each of many parameters.

    Returns:
        The marks; and what of them can be compared at once (``comparable``), ``None`` where it would not tell all.
    """
    known = comparable(parameters)
    if known is None:
        return list(map(marks_of, parameters)), None
    versions, addresses, trains, _, grad_versions = known
    grads = [parameter.grad for parameter in parameters]
    marks = zip(versions, addresses, trains, grads, grad_versions, repeat(()), repeat(None))
    return list(marks), known


def comparable(parameters: Sequence[torch.Tensor]) -> list[Any] | None:
    """Equals what it was before if surely nothing was written to the parameters, whose gradients are still held.

    Returns:
        ``None`` if some parameter has hooks or attributes.
    """
    if not all_plain(parameters):
        return None
    grads = [parameter.grad for parameter in parameters]
    return [
        list(map(torch_internals.version_of, parameters)),
        [p.data_ptr() if p.layout is torch.strided else None for p in parameters],
        [parameter.requires_grad for parameter in parameters],
        list(map(id, grads)),
        [0 if grad is None else torch_internals.version_of(grad) for grad in grads],
    ]


def all_plain(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether none of these has hooks or attributes, as mostly."""
    return list(map(_ATTRIBUTES, parameters)) == [_PLAIN] * len(parameters)


def hooks_of(tensor: torch.Tensor) -> Hooks:
    """The hooks of a tensor, by kind."""
    first, second = torch_internals.hooks_of(tensor)
    if not first and not second:
        return ()
    return tuple((first or {}).items()), tuple((second or {}).items())


def put_hooks(tensor: torch.Tensor, hooks: Hooks) -> None:
    """Gives a tensor these hooks, and no others."""
    for name, entries in zip(torch_internals.HOOKS, hooks or ((), ()), strict=True):
        if entries or getattr(tensor, name):
            setattr(tensor, name, OrderedDict(entries))


def are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one tensor can take the values of the other in its place."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    return one.layout is not torch.strided or one.stride() == other.stride()
