"""How a parameter is seen to have changed: what is remembered of it, without its values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from itertools import chain
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.content.marks import marked
from tfstyle_dist.variables.content.state_objects import Belongs

Hooks = tuple[Any, ...]
Attributes = dict[str, Any] | None
"""The marks of values by name."""


def address_of(parameter: torch.Tensor) -> Any:
    """Where the values are in memory."""
    return parameter.data_ptr() if parameter.layout is torch.strided else None


def memory_of(tensor: torch.Tensor) -> int:
    """Where the whole memory begins of which a tensor has a part; 0 if it cannot be viewed in another way."""
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter | torch.nn.Buffer):
        return 0
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # inside of a function of torch.func
        return 0


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which the elements of a tensor lie; nothing for one without elements, or a sparse one."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether elements of two tensors may have the same memory."""
    (start, stop), (first, end) = extent_of(one), extent_of(other)
    return first < stop and start < end


def marks_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """What ``is_same`` compares."""
    grad = parameter.grad
    version = 0 if grad is None else torch_internals.version_of(grad)
    written, trains = torch_internals.version_of(parameter), parameter.requires_grad
    return written, address_of(parameter), trains, grad, version, hooks_of(parameter), attributes_of(parameter)


def is_same(parameter: torch.Tensor, marks: tuple[Any, ...]) -> bool:
    """Whether a parameter is surely as it was marked."""
    grad = parameter.grad
    return (
        torch_internals.version_of(parameter) == marks[0]
        and grad is marks[3]
        and (grad is None or torch_internals.version_of(grad) == marks[4])
        and parameter.requires_grad is marks[2]
        and address_of(parameter) == marks[1]
        and not parameter.__dict__
        and hooks_of(parameter) == marks[5]
    )


def left_memory(parameters: Sequence[torch.Tensor], marks: Sequence[tuple[Any, ...]]) -> list[int]:
    """Where the values of parameters were that have other memory now, and were written to before or after."""
    return [
        mark[1]
        for parameter, mark in zip(parameters, marks, strict=True)
        if mark[1] is not None and mark[1] != address_of(parameter) and mark[0] != torch_internals.version_of(parameter)
    ]


def has_memory_at(tensor: torch.Tensor, addresses: Sequence[int]) -> bool:
    """Whether one of the addresses lies in the memory of which a tensor has a part."""
    if not addresses or tensor.layout is not torch.strided:
        return False
    memory = tensor.untyped_storage()
    return any(memory.data_ptr() <= address < memory.data_ptr() + memory.nbytes() for address in addresses)


def was_written(tensor: torch.Tensor, version: int, known: Set[int], left: Sequence[int] = ()) -> bool:
    """Whether a parameter or gradient may have other values now.

    Args:
        tensor: it.
        version: that it had.
        known: the ``id`` of those that may have been written to without a trace.
        left: see ``left_memory``.
    """
    return torch_internals.version_of(tensor) != version or id(tensor) in known or has_memory_at(tensor, left)


def attributes_of(parameter: torch.Tensor) -> Attributes:
    """What a program keeps on a parameter, marked."""
    return {name: marked(value) for name, value in parameter.__dict__.items()} if parameter.__dict__ else None


def hooks_of(tensor: torch.Tensor) -> Hooks:
    """The hooks of a tensor, by kind."""
    first, second = torch_internals.hooks_of(tensor)
    if not first and not second:
        return ()
    return tuple((first or {}).items()), tuple((second or {}).items())


def put_hooks(tensor: torch.Tensor, hooks: Hooks, take: Callable[[Any, Belongs], object] | None = None) -> None:
    """Gives a tensor these hooks, and no others; ``take`` is called with each."""
    if take is not None:
        for _, hook in chain.from_iterable(hooks):
            take(hook, Belongs.BESIDE)
    for name, entries in zip(torch_internals.HOOKS, hooks or ((), ()), strict=True):
        if entries or getattr(tensor, name):
            setattr(tensor, name, OrderedDict(entries))


def swap_attributes(parameters: Sequence[torch.Tensor], vessels: Sequence[torch.Tensor]) -> None:
    """Exchanges what torch and programs keep with Python objects: dicts of hooks, and attributes."""
    for parameter, vessel in zip(parameters, vessels, strict=True):
        if parameter.__dict__ or vessel.__dict__:
            parameter.__dict__, vessel.__dict__ = vessel.__dict__, parameter.__dict__
        for name in torch_internals.HOOKS:
            mine, its = getattr(parameter, name), getattr(vessel, name)
            if mine is not None or its is not None:
                setattr(parameter, name, its)
                setattr(vessel, name, mine)


def are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one tensor can take the values of the other in its place."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        return True
    strides = one.stride()
    # With 0 elements lie in each other's memory, and torch does not write to all of them.
    apart = 0 not in strides or all(stride for stride, size in zip(strides, one.shape, strict=True) if size > 1)
    return strides == other.stride() and apart
