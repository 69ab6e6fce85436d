"""Central storage in one process: gradients that a step sets, or changes, by hand.

The first replica's update is made for all, with its gradients. What a backward pass has summed is the same on all
replicas; what a step sets itself, such as statistics of its share of the batch, is the same if it made it so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.gradients.reducer import GradientReducer
from tfstyle_dist.variables.drift import differ
from tfstyle_dist.variables.record import Record

Own = dict[int, tuple[Record, torch.Tensor | None, bool]]
"""By the ``id`` of a record the gradient that one replica has, and whether a backward pass has summed one."""


def own_gradients(reducer: GradientReducer, records: Sequence[Record], number: int, keep: bool = False) -> Own:
    """The gradients of parameters that no backward pass has summed since an optimizer stepped last.

    In runs 1, 2, 4, 8, ... it is those of all parameters: a step may have changed what was summed.

    Args:
        reducer: that sums them in backward passes.
        records: what the optimizer updates.
        number: of the local replica, whose turn it is.
        keep: their values of now, which the update may change before they are compared.
    """
    own: Own = {}
    summed, runs = reducer.summed, reducer.store.runs
    for record in [r for r in records if id(r) not in summed] if runs & (runs - 1) else records:
        if record.policy is not None and record.policy.reduce_at == "backward":
            grad = record.components[number].grad
            grad = grad if grad is None else grad.detach().clone() if keep else grad.detach()
            own[id(record)] = record, grad, id(record) in summed
    return own


def say_different(name: str, all_own: Sequence[Own]) -> str:
    """Compares the gradients that replicas have; those that were summed, and changed then, are warned of.

    Args:
        name: of the optimizer's class.
        all_own: what ``own_gradients`` gave on each replica.

    Returns:
        What to say of gradients that were not summed and are not the same; nothing if they are.
    """
    first, *others = all_own
    for replica, other in enumerate(others, start=1):
        for key in first.keys() & other.keys():
            (record, one, summed), (_, two, _) = first[key], other[key]
            if not _are_different(one, two):
                continue
            why = (
                f"(parameter {record.describe()!r}): replica {replica} has other ones than replica 0. Under central "
                "storage in one process the first replica makes the update for all, so the gradients of the others "
            )
            how = "before the step: get_replica_context().all_reduce('MEAN', gradients)."
            if not summed:
                return (
                    f"{name}.step() would apply gradients that the step has set itself, and that no backward pass has "
                    f"summed {why}would count nowhere. Make them one {how}"
                )
            warn_once(
                f"own gradients {name}",
                f"{name}.step() applies gradients that the step has changed after backward() {why}count nowhere. For "
                f"random noise that is what one device does. Make what depends on the replica's own data one {how}",
            )
    return ""


def _are_different(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.layout is not other.layout:
        return one is not other
    if one.is_sparse:
        one, other = one.coalesce(), other.coalesce()
        same_rows = torch.equal(one.indices(), other.indices().to(one.device))
        return not same_rows or _are_different(one.values(), other.values())
    other = other.to(one.device)
    if one.layout is not torch.strided or one.shape != other.shape or torch.equal(one, other):
        return False
    largest = max(_largest(one), _largest(other))
    if 0 < largest < math.inf:  # small gradients count as large ones do
        one, other = one / largest, other / largest
    return differ(one, other)


def _largest(gradient: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, math.inf)) if gradient.numel() else 0.0
