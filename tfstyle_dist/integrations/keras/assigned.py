"""What a step assigns to variables that not every step changes: weights, learning rates, variables of the program.

In ``fit`` all replicas of all workers assign as one. In a loop of the program's own, a variable of which each replica
has a value is assigned to there; one that the replicas of a worker share is assigned to once for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.integrations.keras.backend import keras, outside_stateless_scope
from tfstyle_dist.integrations.keras.share import CURRENT, is_seed, seed_state
from tfstyle_dist.runtime.context import Frame, current_replica, entered
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.reductions import reduce_columns
from tfstyle_dist.strategies.replica_context import ReplicaContext
from tfstyle_dist.variables import find_record


class StepScope(keras.StatelessScope):  # type: ignore[misc]
    """Keeps what a replica's step assigns to the ledger's variables; everything else goes to ``CURRENT.assign``.

    The state of a seed generator that is not in the ledger, such as one of the program or Keras' own, is another one on
    each replica too. A frozen weight that the step makes trainable is itself from then on, and not the ledger's copy,
    which no gradient reaches and no optimizer updates.

    Args:
        mapping: the ledger's variables, each with its value on this replica.
        replica: its number among all replicas.
        frozen: the ``id()`` of those among them that a step can make trainable.
        known: the ``id()`` of variables that need no remembering; ``None``: nothing is remembered.

    Attributes:
        read: the other variables that the step reads.
    """

    def __init__(
        self,
        mapping: Sequence[tuple[Any, torch.Tensor]],
        replica: int,
        frozen: Iterable[int] = (),
        known: set[int] | None = None,
    ) -> None:
        super().__init__(mapping, collect_losses=True)
        self._known = known
        self.read: list[Any] = []
        self._mapped = {id(variable) for variable, _ in mapping}
        self._frozen = set(frozen)
        self._assigned: set[int] = set()
        self._replica = replica
        context = cast("ReplicaContext | None", current_replica())
        self._device = None if context is None else context.device
        self._seeds: list[Any] = []

    def get_current_value(self, variable: Any) -> Any:
        """Keras asks for each value."""
        if self._known is not None and id(variable) not in self._known:
            self._known.add(id(variable))
            self.read.append(variable)
        if variable.trainable:
            self._let_go(variable)
        if id(variable) not in self.state_mapping and is_seed(variable) and variable._value is not None:
            self._seeds.append(variable)
            self._mapped.add(id(variable))
            self.state_mapping[id(variable)] = seed_state(variable._value.detach(), self._replica)
        value = super().get_current_value(variable)
        if value is None and self._is_elsewhere(variable._value):
            return variable._value.to(self._device)
        return value

    def _is_elsewhere(self, value: torch.Tensor | None) -> bool:
        """Whether it is nobody's, and on the device of another replica."""
        if value is None or self._device is None or value.device.type != self._device.type:
            return False
        return value.device != self._device and find_record(value) is None

    def advance_seeds(self, worker: Worker | None = None) -> None:
        """After the step, for the first replica of a worker: what it drew is drawn.

        Args:
            worker: this one, with all others, which take over the states of the first one; ``None``: they are its own.
        """
        if not self._seeds:
            return
        states = torch.stack([self.state_mapping[id(variable)].to("cpu", torch.int64) for variable in self._seeds])
        if worker is not None and worker.group.size > 1:
            states = states.to(worker.torch_device(0))
            worker.group.broadcast(states, 0, "states of Keras seeds")
        with torch.no_grad():
            for variable, state in zip(self._seeds, states, strict=True):
                variable.assign(state.to(variable.value.device, variable.value.dtype))

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keras calls it for each ``assign``."""
        variable, value = update
        if variable.trainable:
            self._let_go(variable)
        if id(variable) in self._mapped:
            self._assigned.add(id(variable))
            super().add_update(update)
        elif CURRENT.assign is None:
            variable._direct_assign(value)
        else:
            CURRENT.assign(variable, value.detach())

    def _let_go(self, variable: Any) -> None:
        """Of a weight that was frozen at first; what the step has assigned to it so far is its value."""
        if id(variable) not in self._frozen:
            return
        self._frozen.remove(id(variable))
        self._mapped.remove(id(variable))
        value = self.state_mapping[id(variable)]
        self.state_mapping[id(variable)] = variable._value  # Keras asks the scope for weights that have a regularizer
        if id(variable) in self._assigned:
            self.add_update((variable, value))


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

    def joint(payloads: list[tuple[torch.Tensor, int, Any]]) -> list[None]:
        if any(own is not variable and own.trainable for *_, own in payloads):
            raise CollectiveMismatchError(
                f"The replicas of this process assigned to different Keras variables named {variable.name!r} in one "
                "call. In a step that makes frozen weights trainable and assigns to them, set trainable first, and let "
                "all replicas assign afterwards, in the same order."
            )
        reduced = _reduced(strategy, [(own, count) for own, count, _ in payloads], what)
        if reduced is not None:
            with entered(Frame(strategy)), outside_stateless_scope(), torch.no_grad():
                variable.assign(reduced.to(variable.value.device, variable.value.dtype))
        return [None] * len(payloads)

    replica.barrier(what, (value, 1 if CURRENT.count is None else CURRENT.count, variable), joint)


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
    first, values = values[0][0], [(value, count) for value, count in values if count]
    if not _has_a_fraction(first) or all(torch.equal(v.to(first), first) for v, _ in values):
        return first
    total = sum(count for _, count in values)
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
        weight = count if averaged else int(worker.replica_id(local) == 0)
        column.append(number * weight if weight else torch.zeros_like(number))  # not 0 times infinity
        counts.append(torch.tensor([float(count)], device=device))
    total, examples = reduce_columns(strategy, ReduceOp.SUM, [column, counts], what)
    total = total.view(payloads[0][0].shape)
    if not averaged:
        return total
    return total / float(examples) if float(examples) else None
