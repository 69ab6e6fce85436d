"""What a step assigns to variables that not every step changes: weights, learning rates, variables of the program."""

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


def assign_together(replica: ReplicaContext, variable: Any, value: torch.Tensor) -> None:
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
        together = _together(strategy, payloads, what)
        if together is not None:
            with entered(Frame(strategy)), outside_stateless_scope(), torch.no_grad():
                variable.assign(together.to(variable.value.device, variable.value.dtype))
        return [None] * len(payloads)

    replica.barrier(what, (value, 1 if CURRENT.count is None else CURRENT.count), joint)


def _together(strategy: Strategy, payloads: Sequence[tuple[torch.Tensor, int]], what: str) -> torch.Tensor | None:
    """The replicas' values as one; ``None`` where no replica has an example."""
    worker = strategy.worker
    averaged = payloads[0][0].is_floating_point()
    column, counts = [], []
    for local, (value, count) in enumerate(payloads):
        device = worker.torch_device(local)
        number = value.to(device, torch.float64 if averaged else torch.int64)
        column.append(number * (count if averaged else int(worker.replica_id(local) == 0)))
        counts.append(torch.tensor([float(count)], device=device))
    total, examples = reduce_columns(strategy, ReduceOp.SUM, [column, counts], what)
    total = total.view(payloads[0][0].shape)
    if not averaged:
        return total
    return total / float(examples) if float(examples) else None
