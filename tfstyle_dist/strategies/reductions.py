"""Reducing and gathering over all replicas, in cross-replica context."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core import nest
from tfstyle_dist.core.enums import ReduceOp, VariableSynchronization
from tfstyle_dist.core.tracing import region
from tfstyle_dist.cross_device_ops.collective import (
    gather_over_workers,
    reduce_over_workers,
    sparse_sum_over_workers,
    widened,
)
from tfstyle_dist.cross_device_ops.rows import reduce_rows
from tfstyle_dist.runtime.clocks import COMMUNICATION
from tfstyle_dist.strategies.along_axis import axes_of, mean_of, sum_along
from tfstyle_dist.strategies.leaves import (
    check_axis,
    has_rows,
    of_result,
    parts_on_this_worker,
    per_replica_tensors,
    refuse_numbers,
    refuse_rows,
)
from tfstyle_dist.values import IndexedSlices, PerReplica, local_results, may_be_nan, shares_of_results, without_nothing
from tfstyle_dist.variables import DistributedVariable, Variable

if TYPE_CHECKING:
    from tfstyle_dist.strategies.base import Strategy


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
            for place, result in zip(places, flat.split([sums[p].numel() for p in places]), strict=True):
                wanted = columns[place][0].dtype
                dtype = wanted if _was_widened(wanted, result.dtype) else result.dtype
                results[place] = result.view(sums[place].shape).to(sums[place].device, dtype, copy=True)
    return [results[place] for place in range(len(sums))]


def _was_widened(wanted: torch.dtype, now: torch.dtype) -> bool:
    return wanted in (torch.float16, torch.bfloat16) and now is torch.float32


def reduce(strategy: Strategy, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
    """Reduces per-replica values over all replicas of all workers to one value.

    Args:
        reduce_op: SUM or MEAN, or the name in any case.
        value: a nest of ``PerReplica`` (what ``run`` returned) or, with one local replica, of tensors and numbers.
        axis: ``None`` combines the replicas element by element. A number reduces over that dimension inside each
            replica first, a tuple or list of numbers over all of these; MEAN then divides by the total size, so uneven
            batches are weighted by their examples.

    Returns:
        A nest of tensors, the same on all workers.

    Raises:
        RuntimeError: called in replica context.
        TypeError: ``axis`` is no whole number, nor a tuple or list of such.
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
        A nest of tensors, the same on all workers; what is the same on all replicas, such as a plain number on one
        worker, as it is.

    Raises:
        NotImplementedError: a leaf is ``IndexedSlices``.
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


def reduce_value(strategy: Strategy, op: ReduceOp, value: Any, axis: int | Sequence[int] | None) -> Any:
    """``Strategy.reduce`` of one leaf.

    Raises:
        ValueError: not a distributed value (SUM), or an axis out of range.
    """
    count = strategy.worker.num_local_replicas
    if axis is None:
        return reduce_leaf(strategy, op, value)
    values = per_replica_tensors(value, count)
    axes = [axes_of(v, axis) for v in values]
    with torch.no_grad():
        # A sum of zero rows is 0 whatever the dtype; the counts weight each replica by its examples.
        sums = [sum_along(op, v, along) for v, along in zip(values, axes, strict=True)]
        total = reduce_columns(strategy, ReduceOp.SUM, [sums], "reduce")[0]
        if op is ReduceOp.SUM:
            return total
        sizes = [prod(v.shape[dimension] for dimension in along) for v, along in zip(values, axes, strict=True)]
        counts = [torch.tensor(float(size), dtype=torch.float64) for size in sizes]
        return mean_of(total, reduce_columns(strategy, ReduceOp.SUM, [counts], "reduce (sizes)")[0])


def reduce_leaf(strategy: Strategy, op: ReduceOp, value: Any) -> Any:
    """Reduces one value over the replicas; one replica's value comes back untouched."""
    if strategy.num_replicas_in_sync == 1:
        return _of_one_replica(value)
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
    parts: Sequence[Any] | None = value.values if isinstance(value, PerReplica) else None
    if parts is None:
        parts = parts_on_this_worker(strategy.worker, value, op is ReduceOp.MEAN)
    elif op is ReduceOp.SUM:
        refuse_numbers(parts)
    if parts is not None and all(isinstance(part, IndexedSlices) for part in parts):
        return reduce_rows(strategy.worker, op, parts)
    if parts is not None:
        return _reduce_results(strategy, op, [of_result(part, "reduce") for part in parts])
    if op is ReduceOp.MEAN and value is not None:
        return value
    raise ValueError(
        f"{value!r} cannot be reduced with {op.name}: it is not a per-replica value, so each of the "
        f"{strategy.num_replicas_in_sync} replicas holds the same one. Return a tensor from strategy.run and reduce "
        "that; use MEAN for a value that is equal everywhere."
    )


def _of_one_replica(value: Any) -> Any:
    if isinstance(value, DistributedVariable) and value.synchronization is VariableSynchronization.ON_READ:
        return value.values[0].detach().clone()  # a read of it by others would combine its copies
    return value.values[0] if isinstance(value, PerReplica) else value


def over_replicas(op: ReduceOp, total: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """A sum over so many replicas as it is, or divided by their number."""
    return total / count if op is ReduceOp.MEAN else total


def _reduce_results(strategy: Strategy, op: ReduceOp, values: list[torch.Tensor]) -> torch.Tensor:
    """The local replicas' values of one thing, and all other workers', reduced."""
    shares = shares_of_results(values)
    if shares is None or not may_be_nan(values):
        return reduce_columns(strategy, op, [values], "reduce")[0]
    with torch.no_grad():
        total, count = reduce_columns(strategy, ReduceOp.SUM, [*without_nothing(values, shares)], "reduce")
        return over_replicas(op, total, count)


def has_one_copy(strategy: Strategy, value: Any) -> bool:
    """Whether a variable has one copy for several local replicas, as under central storage and outside of scopes."""
    return strategy.worker.num_local_replicas > 1 and len(value._tfstyle_record.copies()) == 1


def gather_value(strategy: Strategy, value: Any, axis: int) -> Any:
    """``Strategy.gather`` of one leaf."""
    if has_rows(value):
        refuse_rows(value, "gather")
    if strategy.num_replicas_in_sync == 1:
        return _of_one_replica(value)
    worker = strategy.worker
    if isinstance(value, PerReplica) or (isinstance(value, Variable) and not has_one_copy(strategy, value)):
        tensors = per_replica_tensors(value, worker.num_local_replicas, "gather")
    else:
        parts = parts_on_this_worker(worker, value, True)
        if parts is None:
            return value  # the same on all replicas: there is nothing to gather, as in TensorFlow
        tensors = [of_result(parts[0], "gather")]  # one for each worker, as in TensorFlow
    for tensor in tensors:
        check_axis(tensor, axis)
    with torch.no_grad():
        return gather_over_workers(worker, [t.detach() for t in tensors], axis, "gather")
