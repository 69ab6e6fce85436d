"""Sums and means along an axis of the replicas' values: in which type they are computed."""

from __future__ import annotations

import torch

from tfstyle_dist.core.enums import ReduceOp


def sum_along(op: ReduceOp, value: torch.Tensor, axis: int) -> torch.Tensor:
    """One replica's part. Integers keep their type in a sum, as in TensorFlow; truth values are counted.

    Args:
        op: what is reduced; for a mean integers get the room of int64.
        value: has the axis.
        axis: of the examples.
    """
    dtype = value.dtype
    widens = op is not ReduceOp.SUM or dtype is torch.bool or dtype.is_floating_point or dtype.is_complex
    return value.detach().sum(dim=axis, dtype=None if widens else dtype)


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
