"""Sums over all replicas: first those of this process, then one call over the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.enums import AggregationMethod, ReduceOp
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.ops import aggregate
from tfstyle_dist.runtime.worker import Worker

_HALF = (torch.float16, torch.bfloat16)
OwnSum = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""A sum that a user defined."""


def true_device(tensor: torch.Tensor) -> torch.device:
    """Where a tensor's data is, also for a variable's copy, whose ``device`` is the logical one."""
    device: torch.device = torch.Tensor.device.__get__(tensor)
    return device


def sum_into(parts: Sequence[torch.Tensor], out: torch.Tensor, method: int) -> None:
    """Writes the sum of ``parts`` into ``out``; the form in which groups of workers add.

    Args:
        parts: tensors of one shape and dtype, at least one.
        out: of the same shape; may be none of the contributions.
        method: an ``AggregationMethod``.
    """
    if len(parts) == 2 and parts[0].dtype not in _HALF:
        torch.add(parts[0], parts[1], out=out)  # all methods are this; small sums are frequent
    else:
        aggregate(parts, method, out=out)


def widened_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of ``dtype`` are summed between workers: float32 for half precision."""
    return torch.float32 if dtype in _HALF else dtype


def widened(worker: Worker, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The local replicas' values as they are summed: partial sums of half precision stay in float32.

    Args:
        worker: says whether the local sum is a partial one.
        values: one tensor for each local replica.
    """
    partial = worker.group.size > 1 and len(values) > 1
    return [v.detach().float() if partial and v.dtype in _HALF else v.detach() for v in values]


def on_first_device(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The local replicas' values where the first replica's is, for a sum."""
    device = true_device(values[0]) if values else None
    return [v.detach().to(device) for v in values]


def local_sum(values: Sequence[torch.Tensor], method: int = AggregationMethod.DEFAULT) -> torch.Tensor:
    """The sum of the local replicas' values as a new tensor on the first one's device.

    Args:
        values: one tensor for each local replica, all of one shape and dtype.
        method: an ``AggregationMethod``.

    Raises:
        InvalidArgumentError: shapes or dtypes differ; the message names the replica.
    """
    moved = on_first_device(values)
    if moved[0].dtype is torch.bool:
        moved = [v.to(torch.int64) for v in moved]
    return aggregate(moved, method)


def sum_parts(
    parts: Sequence[torch.Tensor],
    method: int,
    own_sum: OwnSum | None,
    out: torch.Tensor | None = None,
    divisor: int | None = None,
) -> torch.Tensor:
    """The sum of what this process contributes: as the user's cross-device operation makes it, else by ``aggregate``.

    Args:
        parts: tensors of one shape and dtype, at least one.
        method: an ``AggregationMethod``.
        own_sum: ``CrossDeviceOps.own_sum``.
        out: where the result goes; it may be one of the parts.
        divisor: by what the sum is divided.
    """
    if own_sum is None:
        return aggregate(parts, method, out=out, divisor=divisor)
    total = own_sum(parts)
    if divisor is not None:
        total = total / divisor
    return total if out is None else out.copy_(total)


def reduce_over_workers(
    worker: Worker, op: ReduceOp, total: torch.Tensor, name: str, method: int = AggregationMethod.DEFAULT
) -> torch.Tensor:
    """Turns the local sum into the SUM or MEAN over all replicas.

    Half precision travels and is summed in float32. An integer MEAN is a true division, as in TensorFlow.

    Args:
        worker: gives the group and the number of replicas.
        op: SUM or MEAN.
        total: the local sum; may be overwritten.
        name: for messages.
        method: an ``AggregationMethod``: how the workers' sums are added.
    """
    dtype = total.dtype
    if worker.group.size > 1:
        flat = total.float() if dtype in _HALF else total
        flat = flat.contiguous().reshape(-1)
        worker.group.all_reduce(flat, name, method)
        total = flat.view(total.shape)
    if op is ReduceOp.MEAN:
        total = total / worker.num_replicas
    return total.to(dtype) if dtype in _HALF else total


def sparse_sum_over_workers(worker: Worker, total: torch.Tensor, name: str) -> torch.Tensor:
    """The sum over the workers of sparse COO tensors: rows gathered in rank order, then coalesced."""
    group, total = worker.group, total.coalesce()
    if group.size == 1:
        return total
    count = torch.tensor([torch_internals.entries_of(total)], device=total.device)
    counts = [int(c) for c in group.all_gather(count, f"{name} (row counts)")]
    most = max(counts)
    indices = torch.zeros((total.sparse_dim(), most), dtype=torch.int64, device=total.device)
    indices[:, : torch_internals.entries_of(total)] = total.indices()
    dtype = torch.float32 if total.dtype in _HALF else total.dtype
    values = torch.zeros((most, *total.values().shape[1:]), dtype=dtype, device=total.device)
    values[: torch_internals.entries_of(total)] = total.values()
    all_indices = group.all_gather(indices.reshape(-1), f"{name} (row numbers)")
    all_values = group.all_gather(values.reshape(-1), f"{name} (rows)")
    index = torch.cat([i.view(indices.shape)[:, :c] for i, c in zip(all_indices, counts, strict=True)], dim=1)
    value = torch.cat([v.view(values.shape)[:c] for v, c in zip(all_values, counts, strict=True)])
    summed = torch.sparse_coo_tensor(index, value, total.shape, check_invariants=False).coalesce()
    return summed.to(total.dtype)


def no_rows(like: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of the shape, dtype and device of ``like`` in which no row is set."""
    index = torch.zeros((1, 0), dtype=torch.int64, device=like.device)
    return torch.sparse_coo_tensor(index, like.new_zeros((0, *like.shape[1:])), like.shape, check_invariants=False)


def gather_over_workers(worker: Worker | None, local: Sequence[torch.Tensor], axis: int, name: str) -> torch.Tensor:
    """Concatenates the local replicas' values, then those of all workers, along ``axis`` in replica order.

    Args:
        worker: whose values these are; ``None``: there are no other workers.
        local: one tensor for each local replica.
        axis: a dimension, not negative.
        name: for messages.

    Raises:
        InvalidArgumentError: ranks, types or layouts differ, or sizes differ in another dimension than ``axis``.
    """
    told = [[_told(v) for v in local]]
    alone = worker is None or worker.group.size == 1
    if worker is not None and not alone:  # what does not fit is refused by all workers, so that they stay in step
        told = worker.group.gather_objects(told[0], f"{name} along axis {axis} (shapes)")
    _check_gatherable([entry for of_worker in told for entry in of_worker], axis)
    device = local[0].device
    mine = torch.cat([v.to(device) for v in local], dim=axis)
    if worker is None or alone:
        return mine
    shapes = [_joined([shape for shape, *_ in of_worker], axis) for of_worker in told]
    if mine.is_sparse:
        return torch.cat(_sparse_of_workers(worker, mine.coalesce(), shapes, name), dim=axis)
    flat = torch.zeros(max(map(prod, shapes)), dtype=mine.dtype, device=device)
    flat[: mine.numel()] = mine.reshape(-1)
    parts = worker.group.all_gather(flat, name)
    return torch.cat([p[: prod(shape)].view(shape) for p, shape in zip(parts, shapes, strict=True)], dim=axis)


def _sparse_of_workers(
    worker: Worker, mine: torch.Tensor, shapes: Sequence[list[int]], name: str
) -> list[torch.Tensor]:
    """The sparse COO tensors of all workers."""
    entries = [int(n) for n in worker.group.gather_objects(torch_internals.entries_of(mine), f"{name} (entries)")]
    indices = gather_over_workers(worker, [mine.indices().t()], 0, f"{name} (indices)").split(entries)
    values = gather_over_workers(worker, [mine.values()], 0, f"{name} (values)").split(entries)
    return [
        torch.sparse_coo_tensor(i.t(), v, shape, check_invariants=False)
        for i, v, shape in zip(indices, values, shapes, strict=True)
    ]


def _joined(shapes: Sequence[list[int]], axis: int) -> list[int]:
    """The shape of what has several parts along ``axis``."""
    return [sum(shape[axis] for shape in shapes) if d == axis else size for d, size in enumerate(shapes[0])]


def _told(value: torch.Tensor) -> list[Any]:
    return [list(value.shape), str(value.dtype), str(value.layout)]


def _check_gatherable(told: Sequence[list[Any]], axis: int) -> None:
    first = told[0][0]
    if not 0 <= axis < len(first):
        raise InvalidArgumentError(
            f"gather along axis {axis}: the value has rank {len(first)} and shape {first}; use an axis from 0 to "
            f"{len(first) - 1}. A scalar has no axis: give it one with value.reshape(1)."
        )
    for replica, (shape, *kind) in enumerate(told):
        if len(shape) != len(first) or any(
            a != b for d, (a, b) in enumerate(zip(shape, first, strict=True)) if d != axis
        ):
            raise InvalidArgumentError(
                f"gather along axis {axis}: entry {replica} has shape {shape}, entry 0 has {first}; dimensions and "
                "rank may differ along that axis only."
            )
        if kind != told[0][1:]:
            raise InvalidArgumentError(
                f"gather: entry {replica} is of {' and '.join(kind)}, entry 0 of {' and '.join(told[0][1:])}; cast "
                "them to one dtype and make them all dense or all sparse COO first."
            )
