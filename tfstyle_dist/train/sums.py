"""Sums of gradients over all replicas for ``apply_gradients``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tfstyle_dist.comm import mesh
from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.cross_device_ops.collective import on_first_device, reduce_over_workers, widened, widened_type
from tfstyle_dist.ops import aggregate_columns
from tfstyle_dist.runtime.clocks import COMMUNICATION
from tfstyle_dist.runtime.context import Frame, Replica, entered
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.variables.partitioned import LocalPart
from tfstyle_dist.variables.replicated import Replicated


def reduced(
    caller: str, strategy: Strategy, variables: list[Any], columns: list[list[torch.Tensor | None]], method: int
) -> list[tuple[torch.Tensor, Any]]:
    """The summed gradients; over several workers in one message per dtype, with a flag for each variable.

    Args:
        caller: the call, for messages.
        strategy: whose replicas.
        variables: in the order of all replicas.
        columns: for each variable the local replicas' gradients.
        method: an ``AggregationMethod``.

    Returns:
        Sum and variable, where any replica has a gradient.
    """
    group = strategy.worker.group
    with strategy.worker.clocks[0].counting(COMMUNICATION), torch.no_grad():
        given = [on_first_device([g for g in column if g is not None]) for column in columns]
        given = [widened(strategy.worker, column) for column in given]
        own_sum = strategy.cross_device_ops.own_sum
        if own_sum is None:
            sums = aggregate_columns(given, method)
        else:
            sums = [own_sum(column) if column else None for column in given]
        if group.size == 1:
            return [(g, v) for g, v in zip(sums, variables, strict=True) if g is not None]
        # Between replicas only the same parts of a divided variable are summed.
        given_variables, variables = variables, [LocalPart(v) if mesh.is_divided(v) else v for v in variables]
        for place, variable in enumerate(variables):
            if isinstance(variable, LocalPart) and sums[place] is not None:
                sums[place] = variable.part_like(sums[place])
        described = [(tuple(v.shape), str(v.dtype)) for v in variables]
        group.agree(f"{caller} of {described}, method {method!r}", "apply_gradients")
        places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, variable in enumerate(variables):
            places.setdefault((variable.dtype, value_of(variable).device), []).append(place)
        totals: dict[int, torch.Tensor] = {}
        found: list[tuple[list[int], list[float], torch.Tensor]] = []
        for (dtype, device), members in places.items():
            parts = [_flat(sums[p], variables[p]) for p in members]
            used_here = [float(sums[p] is not None) for p in members]
            flags = torch.tensor(used_here, dtype=widened_type(dtype), device=device)
            flat = torch.cat([*parts, flags])
            flat = reduce_over_workers(strategy.worker, ReduceOp.SUM, flat, "apply_gradients", method)
            found.append((members, used_here, flat))
        for members, used_here, flat in found:  # reading the flags waits for a GPU: when all sums are under way
            # Workers that trace one program have the same gradients; reading the flags would cut it in two.
            used = used_here if group.traces else flat[-len(members) :].tolist()
            offset = 0
            for k, place in enumerate(members):
                count = variables[place].numel()
                if used[k]:
                    totals[place] = flat[offset : offset + count].view(variables[place].shape)
                offset += count
        return [
            (mesh.from_part(totals[p], v) if mesh.is_divided(v) else totals[p], v)
            for p, v in enumerate(given_variables)
            if p in totals
        ]


@contextmanager
def in_grad(parameters: Iterable[torch.Tensor], sums: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Inside, ``.grad`` of the parameters holds these sums, and nothing where there is none; afterwards what it held.

    Args:
        parameters: those that a ``torch.optim`` optimizer updates.
        sums: by the ``id`` of a parameter.
    """
    kept = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in kept:
            total = sums.get(id(parameter))
            parameter.grad = None if total is None else total.to(parameter.dtype)
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


def value_of(variable: Any) -> Any:
    """The tensor that a variable, or a plain tensor, means in the calling context."""
    return variable._tfstyle_value() if isinstance(variable, Replicated) else variable


def _flat(total: torch.Tensor | None, variable: torch.Tensor) -> torch.Tensor:
    if total is None:
        return torch.zeros(variable.numel(), dtype=widened_type(variable.dtype), device=value_of(variable).device)
    return (total.to_dense() if total.is_sparse else total).reshape(-1).to(widened_type(variable.dtype))


def get_loss_reduction() -> ReduceOp:
    """How the optimizers of ``train`` combine the gradients of the replicas: ``ReduceOp.SUM``.

    Divide the loss by the global batch, as ``nn.compute_average_loss`` does.

    Source: ``tf.compat.v1.distribute.get_loss_reduction``.
    """
    return ReduceOp.SUM


def advance(step: Any, replica: Replica | None) -> None:
    """Adds one to the step counter, once for all replicas."""
    one = torch.ones_like(value_of(step).detach())
    if replica is None or replica.num_replicas_in_sync == 1:
        step.assign_add(one)
        return

    def add(payloads: list[Any]) -> list[None]:
        with entered(Frame(replica.strategy)):
            step.assign_add(one)
        return [None] * len(payloads)

    replica.barrier("global_step", None, add)
