"""Sums and means along an axis of the replicas' values: in which type they are computed."""

from __future__ import annotations

from operator import index
from typing import Any

import torch

from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.core.errors import InvalidArgumentError

_WITHOUT_SUM = (torch.uint16, torch.uint32, torch.uint64)


def axes_of(value: torch.Tensor, axis: Any) -> tuple[int, ...]:
    """The dimensions that ``axis`` names, one or several, as numbers from 0 on.

    Raises:
        TypeError: it names none by a whole number.
        ValueError: the value has no such dimension, or one is named twice.
    """
    rank = value.dim()
    try:
        axes = [index(one) for one in axis] if isinstance(axis, tuple | list) else [index(axis)]
    except TypeError:
        raise TypeError(
            f"axis must be a whole number, or a tuple or list of such, got {axis!r}; write e.g. axis=0 or axis=(0, 1)."
        ) from None
    for one in axes:
        if not -rank <= one < rank:
            raise ValueError(
                f"axis {one} is out of range for a per-replica value of rank {rank}: `axis` = {axis} not in "
                f"[{-rank}, {rank}). Write axis=None to reduce over the replicas alone."
            )
    along = tuple(one % rank for one in axes)
    if len(set(along)) < len(along):
        raise InvalidArgumentError(
            f"axis = {axis} names a dimension of a value of shape {tuple(value.shape)} twice; name each once."
        )
    return along


def sum_along(op: ReduceOp, value: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """One replica's part. Integers keep their type in a sum, as in TensorFlow; truth values are counted.

    Args:
        op: what is reduced; for a mean integers get the room of int64.
        value: has the axes.
        axes: of the examples; of no axis the value itself.
    """
    dtype = value.dtype
    grows = not dtype.is_floating_point and not dtype.is_complex
    if dtype in _WITHOUT_SUM or (dtype.is_floating_point and dtype.itemsize == 1):
        raise InvalidArgumentError(
            f"A value of {dtype} has no sum in torch: cast it before it is reduced, e.g. with value.to(torch.float32)."
        )
    if not axes:  # torch would take all of them
        return value.detach().to(torch.int64) if grows and op is not ReduceOp.SUM else value.detach()
    widens = op is not ReduceOp.SUM or dtype is torch.bool or not grows
    return value.detach().sum(dim=axes, dtype=None if widens else dtype)


def mean_of(total: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """A sum over so many examples; of integers in float32, computed with more digits, as that of half precision is.

    Args:
        total: of all replicas.
        count: float64, on any device.
    """
    kept = total.is_floating_point() or total.is_complex()
    exact = total.dtype in (torch.float32, torch.float64) or total.is_complex()
    mean = (total if exact else total.double()) / count.to(total.device, total.real.dtype if exact else torch.float64)
    return mean.to(total.dtype if kept else torch.float32)
