"""Dividing single tensors, and putting them together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tfstyle_dist.comm import mesh
from tfstyle_dist.strategies import get_strategy


def tensor_split(variable_or_tensor: torch.Tensor, num_split: int, axis: int = 0) -> Any:
    """Divides a tensor or parameter over the logical devices of a replica.

    Call it in the scope of a strategy, on all its workers alike. Sizes need not divide evenly.

    Args:
        variable_or_tensor: what to divide; of a parameter a new parameter is made, to be put in its place.
        num_split: into how many parts; the strategy's logical devices per replica.
        axis: which dimension is cut.

    Returns:
        A ``DTensor``; on XLA devices the tensor itself, laid out over the devices.

    Raises:
        ValueError: the strategy has another number of logical devices, or there is no such dimension.

    Example:
        >>> with strategy.scope():
        ...     layer.weight = tpu.experimental.tensor_split(layer.weight, 2, axis=0)
    """
    if not -variable_or_tensor.dim() <= axis < variable_or_tensor.dim():
        raise ValueError(
            f"axis={axis} does not fit a tensor of shape {tuple(variable_or_tensor.shape)}; its dimensions are "
            f"{-variable_or_tensor.dim()} to {variable_or_tensor.dim() - 1}, and a scalar cannot be cut."
        )
    parts = [1] * variable_or_tensor.dim()
    parts[axis] = num_split
    strategy = get_strategy()
    split = getattr(strategy, "experimental_split_to_logical_devices", None)
    if split is None:
        if num_split == 1:
            return variable_or_tensor
        raise ValueError(
            f"{strategy!r} has one logical device in a replica, so a tensor cannot be cut into {num_split} parts. Use "
            f"MirroredStrategy(logical_devices_per_replica={num_split}) under torchrun, in its scope."
        )
    return split(variable_or_tensor, parts)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full values of a divided tensor; one that is not divided comes back as it is.

    All workers of the replica must call it.

    Args:
        tensor: a parameter, or what was computed with one.

    Returns:
        A tensor of the full shape, on each of these workers.
    """
    return mesh.whole(tensor)


def num_local_elements(tensors: Iterable[torch.Tensor]) -> int:
    """How many elements of some tensors this worker holds.

    Example:
        >>> num_local_elements(torch.nn.Linear(3, 2).parameters())
        8
    """
    return sum(mesh.part_of(t).numel() if mesh.is_divided(t) else t.numel() for t in tensors)
