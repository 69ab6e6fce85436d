"""``all_reduce`` and ``all_gather`` of a replica: differentiable, and a wait for the other replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.cross_device_ops.collective import gather_over_workers, true_device
from tfstyle_dist.strategies.leaves import check_axis
from tfstyle_dist.strategies.reductions import over_replicas, reduce_columns
from tfstyle_dist.values import IndexedSlices, may_be_nan, without_nothing

if TYPE_CHECKING:
    from tfstyle_dist.strategies.replica_context import ReplicaContext


def all_reduce(context: ReplicaContext, op: ReduceOp, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The reduced tensors, differentiable where an input is."""
    if not tensors:
        return []
    return list(_AllReduce.apply(context, op, _VALUE, *tensors))  # type: ignore[no-untyped-call]


def all_gather(context: ReplicaContext, tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """The concatenation over the replicas, differentiable where the input is."""
    return _AllGather.apply(context, axis, tensor)  # type: ignore[no-untyped-call,no-any-return]


def reduce_rows(context: ReplicaContext, op: ReduceOp, rows: IndexedSlices) -> IndexedSlices:
    """The rows of all replicas one after the other; of a mean each is divided by the number of replicas."""
    values, numbers = all_gather(context, rows.values, 0), all_gather(context, rows.indices, 0)
    return IndexedSlices(over_replicas(op, values, context.num_replicas_in_sync), numbers, rows.dense_shape)


_VALUE = "all_reduce"  # not the gradient of one


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, context: ReplicaContext, op: ReduceOp, what: str, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.context, ctx.op, ctx.counted, ctx.devices = context, op, None, [true_device(t) for t in tensors]
        share = context.share if what == _VALUE else None
        if share is None or not share.some_empty or not may_be_nan(tensors):
            return tuple(_meet_and_reduce(context, op, tensors, what))
        kept, ctx.counted = without_nothing(tensors, [share] * len(tensors))
        both = _meet_and_reduce(context, ReduceOp.SUM, [*kept, *ctx.counted], "all_reduce")
        totals, ctx.counts = both[: len(tensors)], both[len(tensors) :]
        if op is ReduceOp.MEAN:
            totals = [total / count for total, count in zip(totals, ctx.counts, strict=True)]
        return tuple(totals)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        # By the function itself, which create_graph=True differentiates once more.
        if ctx.counted is None:
            sums = _AllReduce.apply(ctx.context, ctx.op, "gradient of all_reduce", *grads)  # type: ignore[no-untyped-call]
            return (None, None, None, *(s.to(device) for s, device in zip(sums, ctx.devices, strict=True)))
        if ctx.op is ReduceOp.MEAN:
            grads = tuple(grad / count for grad, count in zip(grads, ctx.counts, strict=True))
        sums = _AllReduce.apply(ctx.context, ReduceOp.SUM, "gradient of all_reduce", *grads)  # type: ignore[no-untyped-call]
        own = [s.to(device) for s, device in zip(sums, ctx.devices, strict=True)]
        kept = [torch.where(counted > 0, s, 0) for s, counted in zip(own, ctx.counted, strict=True)]
        return (None, None, None, *kept)


def _meet_and_reduce(
    context: ReplicaContext, op: ReduceOp, tensors: Sequence[torch.Tensor], what: str
) -> list[torch.Tensor]:
    strategy = context.strategy

    def reduce_all(payloads: list[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        if len({len(p) for p in payloads}) > 1:
            raise InvalidArgumentError(
                f"{what}: the replicas gave different numbers of tensors: {[len(p) for p in payloads]}."
            )
        columns = [list(column) for column in zip(*payloads, strict=True)]
        totals = reduce_columns(strategy, op, columns, what)
        devices = [strategy.worker.torch_device(r) if strategy.worker.devices else None for r in range(len(payloads))]
        return [
            [t.to(d if d is not None else t.device, copy=replica > 0) for t in totals]
            for replica, d in enumerate(devices)
        ]

    # A parameter is one object with another content on each replica: what it holds now is taken along.
    return context.barrier(what, [t.detach() for t in tensors], reduce_all, anywhere=True)  # type: ignore[no-any-return]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: ReplicaContext, axis: int, tensor: torch.Tensor) -> torch.Tensor:
        strategy, worker = context.strategy, context.strategy.worker
        check_axis(tensor, axis)

        def gather(payloads: list[torch.Tensor]) -> list[Any]:
            total = gather_over_workers(worker, [p.detach() for p in payloads], axis, "all_gather")
            sizes = torch.tensor([p.shape[axis] for p in payloads], device="cpu")
            before = torch.cat(worker.group.all_gather(sizes, "all_gather (sizes)")) if worker.group.size > 1 else sizes
            return [(total.to(worker.torch_device(r), copy=r > 0), before) for r in range(len(payloads))]

        result, sizes = context.barrier("all_gather", tensor.detach(), gather, anywhere=True)
        ctx.context, ctx.axis, ctx.strategy, ctx.device = context, axis, strategy, true_device(tensor)
        ctx.start, ctx.size = int(sizes[: context.replica_id].sum()), tensor.shape[axis]
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (total,) = _AllReduce.apply(ctx.context, ReduceOp.SUM, "gradient of all_gather", grad)  # type: ignore[no-untyped-call]
        return None, None, total.narrow(ctx.axis, ctx.start, ctx.size).to(ctx.device).contiguous()
