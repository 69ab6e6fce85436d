"""Reducing and gathering over all replicas, in cross-replica context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tfstyle_dist.core import nest
from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.tracing import region
from tfstyle_dist.cross_device_ops.collective import (
    gather_over_workers,
    reduce_over_workers,
    sparse_sum_over_workers,
    widened,
)
from tfstyle_dist.runtime.clocks import COMMUNICATION
from tfstyle_dist.strategies.along_axis import mean_of, sum_along
from tfstyle_dist.values import IndexedSlices, PerReplica, local_results, may_be_nan, shares_of_results, without_nothing
from tfstyle_dist.variables import DistributedVariable, Variable
from tfstyle_dist.variables.replicated import Replicated

if TYPE_CHECKING:
    from tfstyle_dist.strategies.base import Strategy


def as_reducible(leaf: Any, what: str) -> torch.Tensor:
    """The tensor of one leaf.

    Raises:
        ValueError: the leaf is no tensor.
        InvalidArgumentError: its layout is neither dense nor sparse COO.
    """
    if isinstance(leaf, Replicated):
        return leaf._tfstyle_value()
    if isinstance(leaf, np.ndarray | np.generic):
        return torch.as_tensor(leaf)
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested or leaf.layout not in (torch.strided, torch.sparse_coo):
            raise InvalidArgumentError(
                f"{what}: a {'nested tensor' if leaf.is_nested else f'tensor of layout {leaf.layout}'} cannot be "
                "combined over replicas: make it dense, e.g. with to_dense() or torch.nested.to_padded_tensor, or "
                "sparse COO."
            )
        return leaf
    raise ValueError(
        f"{what}: a leaf of type {type(leaf).__name__} ({leaf!r}) cannot be reduced over replicas; None values and "
        "Python numbers have no per-replica value. Pass torch.tensor(...)."
    )


def check_axis(tensor: torch.Tensor, axis: Any) -> None:
    """Raises unless ``axis`` is a dimension of the tensor."""
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise ValueError(f"axis must be a whole number from 0 on, got {axis!r}; write e.g. axis=0.")
    if not 0 <= axis < tensor.dim():
        raise InvalidArgumentError(
            f"axis {axis} does not fit a value of rank {tensor.dim()} and shape {tuple(tensor.shape)}: use a dimension "
            f"from 0 to {tensor.dim() - 1}; negative axes are not accepted, and a scalar needs value.reshape(1) first."
        )


# ---- over all replicas --------------------------------------------------------------------------------------------


def reduce_columns(
    strategy: Strategy, op: ReduceOp, columns: Sequence[Sequence[torch.Tensor]], name: str
) -> list[torch.Tensor]:
    """Reduces several values over the local replicas and the workers.

    Dense ones of a dtype travel in one message, those of the CPU apart from those that a library of GPUs moves.

    Args:
        strategy: gives the worker and the cross-device ops.
        op: SUM or MEAN.
        columns: for each value its tensors on the local replicas.
        name: for messages.
    """
    worker, ops = strategy.worker, strategy.cross_device_ops
    with torch.no_grad():
        sum_values = ops.own_sum or ops.sum_values
        sums = [sum_values(widened(worker, column)) for column in columns]
        if worker.group.size == 1:
            return [over_replicas(op, s, worker.num_replicas) for s in sums]
        method = ops.aggregation_method
        told = [(tuple(s.shape), str(s.dtype), worker.group.backend_of(s.device)) for s in sums]
        worker.group.agree(f"{op.name} of {told}, method {method!r}", name)
        results: dict[int, torch.Tensor] = {}
        dense: dict[tuple[torch.dtype, str], list[int]] = {}
        for place, total in enumerate(sums):
            if total.is_sparse:
                total = sparse_sum_over_workers(worker, total, name)
                results[place] = over_replicas(op, total, worker.num_replicas)
            else:
                dense.setdefault((total.dtype, worker.group.backend_of(total.device)), []).append(place)
        for places in dense.values():
            device = sums[places[0]].device
            flat = torch.cat([sums[p].reshape(-1).to(device) for p in places])
            flat = reduce_over_workers(worker, op, flat, name, method)
            offset = 0
            for place in places:
                count = sums[place].numel()
                result = flat[offset : offset + count].view(sums[place].shape)
                wanted = columns[place][0].dtype
                dtype = wanted if _was_widened(wanted, result.dtype) else result.dtype
                results[place] = result.to(sums[place].device, dtype, copy=True)
                offset += count
    return [results[place] for place in range(len(sums))]


def _was_widened(wanted: torch.dtype, now: torch.dtype) -> bool:
    return wanted in (torch.float16, torch.bfloat16) and now is torch.float32


def reduce(strategy: Strategy, reduce_op: ReduceOp | str, value: Any, axis: int | None) -> Any:
    """Reduces per-replica values over all replicas of all workers to one value.

    Args:
        reduce_op: SUM or MEAN, or the name in any case.
        value: a nest of ``PerReplica`` (what ``run`` returned) or, with one local replica, of tensors.
        axis: ``None`` combines the replicas element by element. A number reduces over that dimension inside each
            replica first; MEAN then divides by the total size, so uneven batches are weighted by their examples.

    Returns:
        A nest of tensors, the same on all workers.

    Raises:
        RuntimeError: called in replica context.
        ValueError: an unknown op, an axis out of range, or a value that is the same on all replicas (SUM).
        InvalidArgumentError: shapes differ between replicas.

    Example:
        >>> float(strategy.reduce("MEAN", per_replica_losses, axis=None))
        0.5
    """
    strategy.require_cross_replica_context("Strategy.reduce", "merge_call, or ReplicaContext.all_reduce")
    op = ReduceOp.from_any(reduce_op)
    with strategy.worker.clocks[0].counting(COMMUNICATION), region("reduce"):
        return nest.map_structure(lambda leaf: reduce_value(strategy, op, leaf, axis), value)


def gather(strategy: Strategy, value: Any, axis: int) -> Any:
    """Concatenates per-replica tensors of all workers along ``axis`` in replica order.

    Args:
        value: a nest of ``PerReplica`` or, with one local replica, of tensors; sizes may differ along
            ``axis`` only.
        axis: a dimension, not negative.

    Returns:
        A nest of tensors, the same on all workers; what is the same on all replicas, such as a plain number, as it is.

    Raises:
        RuntimeError: called in replica context.
        ValueError: ``axis`` is no whole number, or a leaf is no tensor.
        InvalidArgumentError: a scalar, an axis out of range, or shapes that differ elsewhere.

    Example:
        >>> results = strategy.run(lambda: torch.tensor([get_replica_context().replica_id]))
        >>> strategy.gather(results, axis=0)
        tensor([0, 1])
    """
    strategy.require_cross_replica_context("Strategy.gather", "ReplicaContext.all_gather")
    with strategy.worker.clocks[0].counting(COMMUNICATION), region("gather"):
        return nest.map_structure(lambda leaf: gather_value(strategy, leaf, axis), value)


def experimental_local_results(strategy: Strategy, value: Any) -> tuple[Any, ...]:
    """The values of this worker's replicas, in the order of the replicas; no communication.

    Args:
        value: what ``run`` returned, a variable, a nest of such, or anything else.

    Returns:
        A tuple with one entry for each local replica; of a nest one nest each. A plain value gives a 1-tuple.

    Example:
        >>> strategy.experimental_local_results(per_replica_losses)
        (tensor(0.2500), tensor(0.7500))
    """
    return local_results(value, strategy.worker.num_local_replicas)


def unwrap(strategy: Strategy, value: Any) -> tuple[Any, ...]:
    """The older name of ``experimental_local_results``."""
    return strategy.experimental_local_results(value)


def reduce_value(strategy: Strategy, op: ReduceOp, value: Any, axis: int | None) -> Any:
    """``Strategy.reduce`` of one leaf.

    Raises:
        ValueError: not a distributed value (SUM), or an axis out of range.
    """
    count = strategy.worker.num_local_replicas
    if axis is None:
        return reduce_leaf(strategy, op, value)
    values = per_replica_tensors(value, count)
    for v in values:
        if not -v.dim() <= axis < v.dim():
            raise ValueError(
                f"axis {axis} is out of range for a per-replica value of rank {v.dim()}: `axis` = {axis} not in "
                f"[{-v.dim()}, {v.dim()})."
            )
    with torch.no_grad():
        # A sum of zero rows is 0 whatever the dtype; the counts weight each replica by its examples.
        sums = [sum_along(op, v, axis) for v in values]
        total = reduce_columns(strategy, ReduceOp.SUM, [sums], "reduce")[0]
        if op is ReduceOp.SUM:
            return total
        counts = [torch.tensor(float(v.shape[axis]), dtype=torch.float64) for v in values]
        return mean_of(total, reduce_columns(strategy, ReduceOp.SUM, [counts], "reduce (sizes)")[0])


def reduce_leaf(strategy: Strategy, op: ReduceOp, value: Any) -> Any:
    """Reduces one value over the replicas; one replica's value comes back untouched."""
    if strategy.num_replicas_in_sync == 1:
        if isinstance(value, DistributedVariable) and value.synchronization.name == "ON_READ":
            return value.values[0].detach().clone()
        return value.values[0] if isinstance(value, PerReplica) else value
    if isinstance(value, Variable):
        record = value._tfstyle_record
        if record.synchronization.name == "ON_READ" and record.store is strategy.parameter_store:
            return reduce_columns(strategy, op, [[c.detach() for c in record.components]], "reduce")[0]
        if op is ReduceOp.MEAN:
            return value
        if not has_one_copy(strategy, value):
            raise AssertionError(
                f"reduce(SUM) of the mirrored variable {value.name!r}: its copies are equal, so their sum is not "
                "meant. Reduce a value computed in strategy.run, or multiply by num_replicas_in_sync."
            )
    if isinstance(value, PerReplica) and all(isinstance(v, IndexedSlices) for v in value.values):
        return _reduce_rows(strategy, op, value.values)
    if isinstance(value, PerReplica):
        return _reduce_results(strategy, op, [as_reducible(v, "reduce") for v in value.values])
    if isinstance(value, torch.Tensor) and strategy.worker.num_local_replicas == 1:
        return _reduce_results(strategy, op, [value])
    if op is ReduceOp.MEAN and value is not None:
        return value
    raise ValueError(
        f"{value!r} cannot be reduced with SUM: it is not a per-replica value, so each of the "
        f"{strategy.num_replicas_in_sync} replicas holds the same one. Return a tensor from strategy.run and reduce "
        "that; use MEAN for a value that is equal everywhere."
    )


def over_replicas(op: ReduceOp, total: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """A sum over so many replicas as it is, or divided by their number."""
    return total / count if op is ReduceOp.MEAN else total


def _reduce_rows(strategy: Strategy, op: ReduceOp, rows: Sequence[IndexedSlices]) -> IndexedSlices:
    """The rows of all replicas one after the other."""
    with torch.no_grad():
        values = gather_over_workers(strategy.worker, [r.values.detach() for r in rows], 0, "reduce (rows)")
        numbers = gather_over_workers(strategy.worker, [r.indices for r in rows], 0, "reduce (their numbers)")
        return IndexedSlices(over_replicas(op, values, strategy.num_replicas_in_sync), numbers, rows[0].dense_shape)


def _reduce_results(strategy: Strategy, op: ReduceOp, values: list[torch.Tensor]) -> torch.Tensor:
    """The local replicas' values of one thing, and all other workers', reduced."""
    shares = shares_of_results(values)
    if shares is None or not may_be_nan(values):
        return reduce_columns(strategy, op, [values], "reduce")[0]
    with torch.no_grad():
        total, count = reduce_columns(strategy, ReduceOp.SUM, [*without_nothing(values, shares)], "reduce")
        return over_replicas(op, total, count)


def per_replica_tensors(value: Any, count: int) -> list[torch.Tensor]:
    """One tensor for each local replica; a plain tensor counts as identical on all."""
    if isinstance(value, PerReplica):
        return [as_reducible(v, "reduce") for v in value.values]
    if isinstance(value, Variable) and len(value._tfstyle_record.components) == count:
        return [c.detach() for c in value._tfstyle_record.components]
    return [as_reducible(value, "reduce")] * count


def has_one_copy(strategy: Strategy, value: Any) -> bool:
    """Whether a variable has one copy for several local replicas, as under central storage and outside of scopes."""
    return strategy.worker.num_local_replicas > 1 and len(value._tfstyle_record.copies()) == 1


def gather_value(strategy: Strategy, value: Any, axis: int) -> Any:
    """``Strategy.gather`` of one leaf."""
    if strategy.num_replicas_in_sync == 1:
        return value.values[0] if isinstance(value, PerReplica) else value
    local = strategy.worker.num_local_replicas
    has_parts = isinstance(value, PerReplica) or (isinstance(value, Variable) and not has_one_copy(strategy, value))
    if not has_parts and (local > 1 or not isinstance(value, torch.Tensor)):
        return value  # the same on all replicas: there is nothing to gather, as in TensorFlow
    tensors = per_replica_tensors(value, strategy.worker.num_local_replicas)
    for tensor in tensors:
        check_axis(tensor, axis)
    with torch.no_grad():
        return gather_over_workers(strategy.worker, [t.detach() for t in tensors], axis, "gather")
