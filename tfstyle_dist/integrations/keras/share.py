"""What one replica brings into a step: how many examples, and what its step changed besides the weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.integrations.keras.logs import own_values

_SEED_STATE = "seed_generator_state"
APART = 1_000_003
"""Between the seeds of neighbouring replicas."""


class _Current(threading.local):
    """The step under way in this thread.

    Attributes:
        count: examples behind the gradients of this replica; ``None`` outside of ``fit``.
        push: takes the optimizer, gradients and variables in place of the optimizer's ``apply`` (parameter servers).
        assign: takes a variable that is not in the ledger, and the value that the step assigns to it.
        losses: whether the losses that ``compile`` was given are being computed.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        self.push: Callable[[Any, Sequence[Any], Sequence[Any]], None] | None = None
        self.assign: Callable[[Any, torch.Tensor], None] | None = None
        self.losses = False


CURRENT = _Current()


class Ledger:
    """The variables that steps change besides the weights, and how the replicas' changes become one.

    Metrics are summed over the replicas, as their ``aggregation`` says; one that says "none" must not change. Moving
    statistics (BatchNorm) become the mean, weighted by examples. Whole numbers follow the first replica; the state of
    seed generators is another one on each replica, so that dropout differs. What a step assigns to other variables is
    for ``assigned.StepScope``.

    Args:
        model: a built Keras model.
        training: whether the weights' statistics change too.
        extra: further variables, such as the state of Keras' own seed generator.

    Attributes:
        entries: the variables, each with its rule.
        frozen: the ``id()`` of those that were not trainable; a step may make weights among them trainable.
        regularized: the weights that have a regularizer.
        names: of the model's metrics, as its logs have them.
    """

    def __init__(self, model: Any, training: bool, extra: Sequence[Any] = ()) -> None:
        self.names = list(own_values(model.get_metrics_result()))
        self._model = model
        candidates = [*model.metrics_variables, *model.non_trainable_variables, *extra]
        self.entries: list[tuple[Any, str]] = []
        self.regularized = [v for v in model.trainable_variables if v.regularizer is not None]
        measured = {id(v) for v in model.metrics_variables}
        for variable in {id(v): v for v in candidates}.values():
            rule = _rule(variable, id(variable) in measured)
            if training or rule != "mean":
                self.entries.append((variable, rule))
        self.frozen = frozenset(id(variable) for variable, _ in self.entries if not variable.trainable)

    def begin(self, replica: int, parts: int = 0, device: torch.device | None = None) -> list[tuple[Any, torch.Tensor]]:
        """The values with which a replica's step begins.

        Args:
            replica: its number among all replicas.
            parts: into how many a sum is divided, so that what a step reads of a metric is what it is up to now; 0:
                this replica begins with nothing.
            device: where it computes; the variables themselves live on the first replica's device.

        Returns:
            Pairs of variable and a tensor of the replica's own, for ``StatelessScope``.
        """
        mapping = []
        with torch.no_grad():
            for variable, rule in self.entries:
                value = variable.value
                start = part_of_sum(value, replica, parts) if rule == "sum" else value.clone()
                if rule == "seed":
                    start = seed_state(start, replica)
                if device is not None and device.type == start.device.type:
                    start = start.to(device)
                mapping.append((variable, start))
        return mapping

    def changes(self, scope: Any, began: Sequence[torch.Tensor], count: int, replica: int) -> list[torch.Tensor]:
        """What a replica's step did, as numbers that are summed over all replicas.

        Args:
            scope: the ``StatelessScope`` of the step.
            began: the values of ``begin``, from before the step.
            count: examples of the replica; with 0 it changes nothing.
            replica: its number among all replicas.
        """
        parts = []
        for (variable, rule), start in zip(self.entries, began, strict=True):
            now = scope.get_current_value(variable).detach().to(torch.float64).reshape(-1)
            before = start.to(torch.float64).reshape(-1)
            if count == 0 or (rule in ("first", "seed") and replica):
                parts.append(torch.zeros_like(before))
            elif rule == "none":
                _refuse_change(variable, before, now)
                parts.append(torch.zeros_like(before))
            elif rule == "mean":
                parts.append(now * count)
            else:
                parts.append(now - before)
        return parts

    def source_of(self, name: str, value: torch.Tensor) -> int:
        """Of which metric a log is the result, whatever its name; called inside the scope of a replica's step.

        Args:
            name: of the log.
            value: the log.

        Returns:
            The place of the metric in ``names``, from 1 on; 0 for a number of the user's own.
        """
        own = own_values(self._model.get_metrics_result())
        for known in sorted(self.names, key=lambda known: known != name):
            result = torch.as_tensor(own[known]).detach()
            if result.shape == value.shape and torch.equal(result.to(value), value):
                return self.names.index(known) + 1
        return 0

    def settle(self, total: torch.Tensor, count: float) -> None:
        """Gives every variable its new value.

        Args:
            total: the summed numbers of ``changes``, one after the other.
            count: examples of all replicas.
        """
        offset = 0
        with torch.no_grad():
            for variable, rule in self.entries:
                value = variable.value
                size = value.numel()
                part = total[offset : offset + size].view(value.shape)
                offset += size
                if rule != "mean":
                    part = value.to(part) + part
                elif count:
                    part = part / count
                variable.assign(part.to(value.device, value.dtype))

    @property
    def numel(self) -> int:
        """How many numbers ``changes`` has in all."""
        return sum(v.value.numel() for v, _ in self.entries)


def _refuse_change(variable: Any, before: torch.Tensor, now: torch.Tensor) -> None:
    """A metric's variable of which nothing says what the replicas' values are together must stay as it is."""
    if not torch.allclose(now, before, rtol=0.0, atol=0.0, equal_nan=True):
        raise ValueError(
            f"A step changed the metric's variable {variable.path!r}, which has aggregation='none': what the values of "
            "several replicas are together is not known. Make it with add_weight, which sums them, or with "
            "add_variable(..., aggregation='sum'), 'mean' or 'only_first_replica'."
        )


def is_seed(variable: Any) -> bool:
    """Whether a variable is the state of a seed generator: each replica and worker has its own."""
    return bool(variable.name == _SEED_STATE and tuple(variable.shape) == (2,))


def seed_state(state: torch.Tensor, replica: int) -> torch.Tensor:
    """The state of a seed generator as a replica begins with it, a tensor of its own."""
    state = state.clone()
    if replica:
        state[0] = (state[0].to(torch.int64) + replica * APART) % 2**31
    return state


def part_of_sum(value: torch.Tensor, replica: int, parts: int) -> torch.Tensor:
    """A replica's part of a sum that is divided into so many, of which the first replica has the rest."""
    if not parts:
        return torch.zeros_like(value)
    if value.is_floating_point() or value.is_complex():
        return value / parts
    if value.dtype is torch.bool:
        return torch.zeros_like(value) if replica else value.clone()
    share = value // parts
    return share if replica else value - share * (parts - 1)


def _rule(variable: Any, measured: bool) -> str:
    if is_seed(variable):
        return "seed"
    if measured and variable.aggregation == "none":
        return "none"
    if variable.aggregation == "sum":
        return "sum"
    floating = keras.backend.is_float_dtype(variable.dtype)
    return "mean" if floating and variable.aggregation != "only_first_replica" else "first"
