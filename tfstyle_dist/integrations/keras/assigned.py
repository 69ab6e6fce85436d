"""What a step assigns to variables that not every step changes: weights, learning rates, variables of the program.

In ``fit`` all replicas of all workers assign as one. In a loop of the program's own, a variable of which each replica
has a value is assigned to there; one that the replicas of a worker share is assigned to once for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.integrations.keras.backend import keras, outside_stateless_scope
from tfstyle_dist.integrations.keras.share import CURRENT
from tfstyle_dist.runtime.context import Frame, entered
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.reductions import reduce_columns
from tfstyle_dist.strategies.replica_context import ReplicaContext


class StepScope(keras.StatelessScope):  # type: ignore[misc]
    """Keeps what a replica's step assigns to the ledger's variables; everything else goes to ``CURRENT.assign``.

    Args:
        mapping: the ledger's variables, each with its value on this replica.
    """

    def __init__(self, mapping: Sequence[tuple[Any, torch.Tensor]]) -> None:
        super().__init__(mapping, collect_losses=True)
        self._mapped = {id(variable) for variable, _ in mapping}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keras calls it for each ``assign``."""
        variable, value = update
        if id(variable) in self._mapped or CURRENT.assign is None:
            super().add_update(update)
        else:
            CURRENT.assign(variable, value.detach())


def assign_on_all(replica: ReplicaContext, variable: Any, value: torch.Tensor) -> None:
    """Assigns to a variable for all replicas together, at once: as TensorFlow does it for a mirrored variable.

    Metrics that are not the model's, such as one of the program, keep a part for each replica, as in ``strategy.run``.

    Args:
        replica: that calls it; all replicas must.
        variable: of Keras.
        value: this replica's. Numbers with a fraction become the mean over the examples, others are the first
            replica's.
    """
    if variable._synchronization == "on_read" and variable.aggregation == "sum":
        variable._direct_assign(value)
        return
    strategy = replica.strategy
    what = f"assigning to a Keras variable {variable.name!r} in a step"  # paths have numbers that differ by worker

    def joint(payloads: list[tuple[torch.Tensor, int]]) -> list[None]:
        reduced = _reduced(strategy, payloads, what)
        if reduced is not None:
            with entered(Frame(strategy)), outside_stateless_scope(), torch.no_grad():
                variable.assign(reduced.to(variable.value.device, variable.value.dtype))
        return [None] * len(payloads)

    replica.barrier(what, (value, 1 if CURRENT.count is None else CURRENT.count), joint)


def assign_once(replica: ReplicaContext, variable: Any, value: torch.Tensor) -> None:
    """Assigns to a variable that the replicas of this worker share, once, as each of two workers would.

    Args:
        replica: that calls it; all replicas of this worker must.
        variable: of Keras. If the replicas name different ones, each is assigned its own value.
        value: this replica's; merged as in ``assign_on_all``, over the replicas of this worker.
    """
    strategy, share = replica.strategy, replica.share

    def joint(payloads: list[tuple[Any, torch.Tensor, int]]) -> list[None]:
        groups: dict[int, list[tuple[Any, torch.Tensor, int]]] = {}
        for payload in payloads:
            groups.setdefault(id(payload[0]), []).append(payload)
        with entered(Frame(strategy)), outside_stateless_scope(), torch.no_grad():
            for group in groups.values():
                shared = group[0][0]
                shared.assign(_merged([(own, count) for _, own, count in group]).to(shared.value.device))
        return [None] * len(payloads)

    examples = 1 if share is None else share.examples
    replica.barrier(f"assigning to a Keras variable {variable.name!r}", (variable, value.detach(), examples), joint)


def _merged(values: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    first, total = values[0][0], sum(count for _, count in values)
    if not _has_a_fraction(first) or not total or all(torch.equal(v.to(first), first) for v, _ in values):
        return first
    dtype = torch.promote_types(first.dtype, torch.float64)
    mean = sum(v.to(first.device, dtype) * count for v, count in values) / total
    return torch.as_tensor(mean).to(first.dtype)


def _has_a_fraction(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _reduced(strategy: Strategy, payloads: Sequence[tuple[torch.Tensor, int]], what: str) -> torch.Tensor | None:
    """The replicas' values as one; ``None`` where no replica has an example."""
    worker = strategy.worker
    averaged = _has_a_fraction(payloads[0][0])
    dtype = torch.promote_types(payloads[0][0].dtype, torch.float64 if averaged else torch.int64)
    column, counts = [], []
    for local, (value, count) in enumerate(payloads):
        device = worker.torch_device(local)
        number = value.to(device, dtype)
        column.append(number * (count if averaged else int(worker.replica_id(local) == 0)))
        counts.append(torch.tensor([float(count)], device=device))
    total, examples = reduce_columns(strategy, ReduceOp.SUM, [column, counts], what)
    total = total.view(payloads[0][0].shape)
    if not averaged:
        return total
    return total / float(examples) if float(examples) else None
