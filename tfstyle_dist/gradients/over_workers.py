"""Sums that can be differentiated: of gradients, and for where no replica's context has an ``all_reduce``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.cross_device_ops.collective import reduce_over_workers, sparse_sum_over_workers
from tfstyle_dist.gradients.reducer import GradientReducer, GradientState
from tfstyle_dist.runtime.worker import Worker

AllReduce = Callable[[ReduceOp, Any], Any]
"""Takes the operation and a tensor or a list of tensors; what it returns can be differentiated."""


def sum_graphs(
    reducer: GradientReducer, given: Sequence[tuple[GradientState, torch.Tensor | None]], all_reduce: AllReduce
) -> None:
    """Sums the gradients of the same parameters on all replicas, as functions of them; who has none adds zeros."""
    with torch.enable_grad():
        for divided in (True, False):
            some = [(s, grad) for s, grad in given if (reducer.divisor(s.record) is not None) is divided]
            leaves = [s.record.components[s.replica] for s, _ in some]
            olds = [None if divided else s.before for s, _ in some]
            news = [
                torch.zeros_like(leaf) if grad is None else grad if old is None else grad - old
                for (_, grad), leaf, old in zip(some, leaves, olds, strict=True)
            ]
            totals = all_reduce(ReduceOp.MEAN if divided else ReduceOp.SUM, news) if some else []
            for (state, _), leaf, old, total in zip(some, leaves, olds, totals, strict=True):
                leaf.grad = total if old is None else total + old
                reducer.settle(state)


def over_workers(worker: Worker) -> AllReduce:
    """What stands for a replica's ``all_reduce`` where each worker has one replica."""
    return partial(_reduced, worker)


def _reduced(worker: Worker, op: ReduceOp, value: torch.Tensor | list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return _OverWorkers.apply(worker, op, value)[0]  # type: ignore[no-untyped-call]
    return list(_OverWorkers.apply(worker, op, *value))  # type: ignore[no-untyped-call]


class _OverWorkers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, worker: Worker, op: ReduceOp, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.worker, ctx.op = worker, op
        return tuple(_over_workers(worker, op, t, "all_reduce") for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *_OverWorkers.apply(ctx.worker, ctx.op, *grads))  # type: ignore[no-untyped-call]


def _over_workers(worker: Worker, op: ReduceOp, value: torch.Tensor, name: str) -> torch.Tensor:
    if value.is_sparse:
        total = sparse_sum_over_workers(worker, value, name)
        return total / worker.num_replicas if op is ReduceOp.MEAN else total
    return reduce_over_workers(worker, op, value.clone(), name)
