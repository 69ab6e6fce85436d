"""What the replicas do together in a step: each worker sends what its replicas gave, and gets what the others did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from tfstyle_dist.core import nest
from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.membership.membership import Membership
from tfstyle_dist.elastic.state.tensor_numbers import TensorNumbers
from tfstyle_dist.elastic.steps import gradient_exchange
from tfstyle_dist.elastic.steps.gradient_exchange import GradientExchange
from tfstyle_dist.elastic.steps.serialized_leaves import LeafReader, check_same_everywhere, describe
from tfstyle_dist.elastic.steps.step_random import StepRandomStreams
from tfstyle_dist.gradients.reducer import GradientReducer
from tfstyle_dist.variables.store import ParameterStore

_EXCHANGED = (
    "all_reduce", "gradient of all_reduce", "all_gather", "gradient of all_gather", "merge_call", "global_step",
)  # fmt: skip
_APPLIES = (".apply_gradients", ".apply_gradients without aggregation")


class JointWork:
    """See ``Exchanger``.

    Args:
        membership: the other workers.
        store: what the strategy owns.
        reducer: of its gradients.
        replicas: R.
        streams: of random numbers.

    Attributes:
        held: the replicas of this worker.
        parts: gradients on their way.
    """

    def __init__(
        self,
        membership: Membership,
        store: ParameterStore,
        reducer: GradientReducer,
        replicas: int,
        streams: StepRandomStreams,
    ) -> None:
        self._membership, self._store, self._replicas, self._streams = membership, store, replicas, streams
        self.parts = GradientExchange(reducer)
        self.held: tuple[int, ...] = ()

    def exchange(self, kind: str, own: dict[int, Any]) -> list[Any]:
        """See ``Exchanger``."""
        if kind == gradient_exchange.KIND:
            return self._exchange_gradients(own)
        if not (kind in _EXCHANGED or " of variable " in kind or kind.endswith(_APPLIES)):
            raise NotImplementedError(
                f"{kind} is not supported in an elastic job yet. Create variables in strategy.scope() before "
                "strategy.run; optimizers of torch.optim and of the train module work, those of Keras do not."
            )
        numbers = TensorNumbers(self._store)
        first, spec = nest.flatten(next(iter(own.values())))
        told: dict[int, Any] = {}
        tensors: list[torch.Tensor] = []
        for replica, payload in own.items():
            leaves = nest.flatten(payload)[0]
            if kind.endswith(_APPLIES):
                _check_updated(payload, numbers, kind)
            told[replica], sent = describe(leaves, numbers.number)
            check_same_everywhere(leaves, told[replica], kind)
            tensors += sent
        found = dict(own)
        for replica, what, reader in self._gathered(kind, told, tensors, numbers.tensor):
            found[replica] = nest.unflatten(reader.leaves(what, first, kind), spec)
        return [found.get(replica) for replica in range(self._replicas)]

    def _exchange_gradients(self, own: dict[int, Any]) -> list[Any]:
        told: dict[int, Any] = {}
        tensors: list[torch.Tensor] = []
        for replica, touched in own.items():
            numbers, what, sent = self.parts.describe(replica, touched)
            told[replica] = numbers, what
            tensors += sent
        found = dict(own)
        given = {replica: {entry[0] for entry in numbers} for replica, (numbers, _) in told.items()}
        for replica, (numbers, what), reader in self._gathered(gradient_exchange.KIND, told, tensors):
            given[replica] = {entry[0] for entry in numbers}
            found[replica] = self.parts.take(replica, self.held[0], numbers, what, reader)
        anywhere = set().union(*given.values())
        if any(numbers != anywhere for numbers in given.values()):
            self._exchange_old({replica: anywhere - numbers for replica, numbers in given.items()})
        return [found.get(replica) for replica in range(self._replicas)]

    def _exchange_old(self, missing: dict[int, set[int]]) -> None:
        """Replicas that have got nothing for a parameter have their part in the mean: what they had before."""
        told: dict[int, Any] = {}
        tensors: list[torch.Tensor] = []
        for replica in self.held:
            numbers, what, sent = self.parts.describe_old(replica, missing[replica])
            told[replica] = numbers, what
            tensors += sent
        for replica, (numbers, what), reader in self._gathered(gradient_exchange.OLD_KIND, told, tensors):
            self.parts.take_old(replica, missing[replica], numbers, what, reader)

    def _gathered(
        self,
        kind: str,
        told: dict[int, Any],
        tensors: list[torch.Tensor],
        tensor_of: Callable[[int], torch.Tensor] | None = None,
    ) -> Iterator[tuple[int, Any, LeafReader]]:
        """Tells all workers something of each replica here; gives what the others tell of theirs, by replica."""
        packet = Packet({"replicas": {str(replica): what for replica, what in told.items()}}, tensors)
        for member, came in self._membership.gather(kind, packet).items():
            reader = LeafReader(came.tensors, tensor_of)
            for name, what in came.header["replicas"].items() if member != self._membership.me else ():
                yield int(name), what, reader

    def settled(self, kind: str) -> None:
        """See ``Exchanger``."""
        if kind == gradient_exchange.KIND:
            self.parts.settle()

    def same_numbers(self) -> AbstractContextManager[None]:
        """See ``Exchanger``."""
        return self._streams.joint_work()


def _check_updated(pairs: list[Any], numbers: TensorNumbers, kind: str) -> None:
    """Raises ValueError for a variable that other workers do not know."""
    for _, variable in pairs:
        if numbers.number(variable) is None:
            raise ValueError(
                f"{kind} was given a variable of shape {tuple(variable.shape)} that does not belong to the strategy, "
                "so the workers of an elastic job have no common name for it, and cannot put it back or send it. "
                "Create it in strategy.scope(), or call strategy.experimental_adopt with its module."
            )
