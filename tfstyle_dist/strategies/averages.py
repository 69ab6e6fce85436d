"""Means that count every example once, however the batches were divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.core import launch_env
from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.cross_device_ops.collective import reduce_over_workers
from tfstyle_dist.runtime.context import replica_of
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.contexts import get_strategy, has_strategy
from tfstyle_dist.values import component_values


def exact_mean(values: Any, counts: Any, *, strategy: Strategy | None = None) -> torch.Tensor:
    """The mean over all examples of all replicas, from means of batches and the batches' sizes.

    The average of averages is wrong as soon as two batches differ in size: the last one of an epoch, or the shares
    of an uneven global batch. Here each value weighs as much as its count; one of count 0 (an empty share, whose
    mean is NaN) weighs nothing.

    Args:
        values: a mean, as a number or tensor; in cross-replica context also a ``PerReplica``; or a list of such, one
            entry for each step.
        counts: the number of examples behind each value, in the same form.
        strategy: whose replicas count; default: the one in force.

    Returns:
        A tensor of the values' shape, the same on all replicas and workers; NaN when all counts are 0.

    Raises:
        ValueError: values and counts are lists of different lengths.
        RuntimeError: several workers, and no strategy is in force and none given.

    Example:
        >>> exact_mean([1.0, 4.0], [2, 1])
        tensor(2.)

    Call it on all replicas alike inside ``run``, or on all workers alike outside.
    """
    strategy = strategy or _strategy_in_force()
    pairs = _pairs(values, counts)
    dtype = _dtype_of(pairs)
    sums = torch.stack([_weighted(value, count) for value, count in pairs]).sum(0) if pairs else torch.zeros(2)
    sums = sums.to(torch.float64)
    if (replica := replica_of(strategy)) is not None:
        sums = replica.all_reduce(ReduceOp.SUM, sums)
    else:
        device = strategy.worker.torch_device(0)
        sums = reduce_over_workers(strategy.worker, ReduceOp.SUM, sums.to(device), "exact mean")
    return (sums[0] / sums[1]).to(dtype)


def _strategy_in_force() -> Strategy:
    launch = launch_env.launch()
    if not has_strategy() and launch is not None and launch.world_size > 1:
        raise RuntimeError(
            f"exact_mean was called outside of every scope in one of {launch.world_size} processes, so it cannot tell "
            "whose values to combine. Call it inside strategy.scope() or strategy.run, or pass strategy=strategy."
        )
    return get_strategy()


def _pairs(values: Any, counts: Any) -> list[tuple[Any, Any]]:
    """All values with their counts: steps and local replicas laid out in one list."""
    if isinstance(values, list | tuple) or isinstance(counts, list | tuple):
        several = isinstance(values, list | tuple) and isinstance(counts, list | tuple)
        if not several or len(values) != len(counts):
            raise ValueError(
                f"exact_mean needs one count for each value, got {_size(values)} value(s) and {_size(counts)} count(s)."
            )
        return [pair for v, c in zip(values, counts, strict=True) for pair in _pairs(v, c)]
    value_parts, count_parts = component_values(values), component_values(counts)
    if value_parts is None and count_parts is None:
        return [(values, counts)]
    size = len(value_parts if value_parts is not None else count_parts or ())
    value_parts, count_parts = value_parts or (values,) * size, count_parts or (counts,) * size
    return list(zip(value_parts, count_parts, strict=True))


def _size(values: Any) -> int:
    return len(values) if isinstance(values, list | tuple) else 1


def _weighted(value: Any, count: Any) -> torch.Tensor:
    value = torch.as_tensor(value).detach().to(torch.float64)
    count = torch.as_tensor(count, device=value.device).detach().to(torch.float64).expand(value.shape)
    return torch.stack([torch.where(count > 0, value * count, torch.zeros_like(value)), count]).cpu()


def _dtype_of(pairs: Sequence[tuple[Any, Any]]) -> torch.dtype:
    tensors = [v for v, _ in pairs if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return tensors[0].dtype if tensors else torch.get_default_dtype()
