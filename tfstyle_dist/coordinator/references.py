"""What stands in a pickle for things that each task has its own of: the strategy, variables, optimizers, iterators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tfstyle_dist.coordinator.per_worker import PerWorkerResource, PerWorkerValues
from tfstyle_dist.coordinator.remote_value import RemoteValue
from tfstyle_dist.input import DistributedDataset
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.parameter_server.protocol import pickling
from tfstyle_dist.parameter_server.server.optimizer_rules import optimizer_state, restore_optimizer, without_a_step
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.parameter_server.push_runner import check_hooks_of
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy
from tfstyle_dist.variables.adoption import adopt_new_buffers
from tfstyle_dist.variables.known_tensors import find_record

_travellers: list[tuple[type, Callable[[Any, Outgoing], tuple[Callable[[Incoming, Any], Any], Any]]]] = []


def register(kind: type, describe: Callable[[Any, Outgoing], tuple[Callable[[Incoming, Any], Any], Any]]) -> None:
    """Lets objects of another library travel.

    Args:
        kind: their class; the class registered first is asked first.
        describe: of an object a function that workers can import, and what it is called with after ``Incoming``; its
            result is the worker's own object.
    """
    if all(known is not kind for known, _ in _travellers):
        _travellers.append((kind, describe))


_PLAIN = frozenset({int, float, str, bytes, bool, tuple, list, dict, type(None), type})


class Outgoing:
    """References made by the coordinator.

    Args:
        strategy: its strategy.
        on_resource: told of each per-worker resource that is referred to.

    Attributes:
        strategy: the same.
        values: collects the ``RemoteValue`` arguments; ``None`` where none is allowed.
    """

    def __init__(self, strategy: ParameterServerStrategy, on_resource: Callable[[PerWorkerResource], None]) -> None:
        self.strategy, self._on_resource = strategy, on_resource
        self.values: list[RemoteValue] | None = None

    def __call__(self, value: Any) -> Any:
        """The reference for ``value``, or ``None`` if it travels itself.

        Raises:
            ValueError: a ``RemoteValue`` elsewhere than among arguments.
            TypeError: something that belongs to this process alone.
        """
        if type(value) in _PLAIN:
            return None
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, Strategy):
            if value is not self.strategy:
                raise TypeError(f"A scheduled function refers to {value!r}, not to the coordinator's own strategy.")
            return ("strategy",)
        if isinstance(value, PerWorkerResource):
            self._on_resource(value)
            return "resource", value.number
        if isinstance(value, PerWorkerValues):
            return "per worker", [[bytes(p) for p in pickling.dumps(v, self)] for v in value.values]
        if isinstance(value, RemoteValue):
            if self.values is None:
                raise ValueError(
                    "A scheduled function has a RemoteValue inside it. Give it as an argument: "
                    "schedule(fn, args=(remote_value,)), or fetch() it first."
                )
            self.values.append(value)
            return "value", value.number
        if isinstance(value, torch.nn.Module):
            adopt_new_buffers(self.strategy.remote_store, value)
        if getattr(type(value), "_tfstyle_stays_here", False):
            return "stays", type(value).__name__
        if isinstance(value, DistributedDataset):
            return self._dataset(value)
        for known, describe in _travellers:
            if isinstance(value, known):
                return "made", *describe(value, self)
        return self._optimizer(value)

    def _tensor(self, value: torch.Tensor) -> Any:
        record = getattr(value, "_tfstyle_record", None)
        if not isinstance(record, RemoteRecord) or record.tensor is not value:
            return None
        if record.store is not self.strategy.parameter_store:
            raise TypeError(f"{record.describe()!r} belongs to another strategy")
        check_hooks_of([value])
        return "tensor", self.strategy.remote_store.description(value)

    def _dataset(self, value: DistributedDataset) -> Any:
        """Each worker makes its own one, from the dataset or function that this one was made from."""
        if value.worker is not self.strategy.worker or value.recipe is None:
            raise TypeError(
                "A distributed dataset of another strategy cannot go to the workers. Make it with the strategy of this "
                "coordinator, or in a function: coordinator.create_per_worker_dataset(dataset_fn)."
            )
        return "dataset", [bytes(p) for p in pickling.dumps(value.recipe, self)]

    def _optimizer(self, value: Any) -> Any:
        styled = hasattr(type(value), "without_slots") and not hasattr(value, "torch_optimizer")
        if not styled and not isinstance(value, torch.optim.Optimizer):
            return None
        number = self.strategy.optimizer_number(value)
        return "optimizer", number, [bytes(p) for p in pickling.dumps(optimizer_state(value), self)]


def _of_worker(kind: type, state: dict[str, Any]) -> Any:
    return restore_optimizer(without_a_step(kind), state)


class Incoming:
    """References resolved by a worker.

    Args:
        strategy: the worker's.
        index: of the worker.
        resource: its own object of a per-worker resource.
        value: the result of an earlier call.

    Attributes:
        strategy, index: the same.
        seen: the tensors on servers that were referred to, as far as they are pulled before a function starts.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        index: int,
        resource: Callable[[int], Any],
        value: Callable[[int], Any],
    ) -> None:
        self.strategy, self.index, self._resource, self._value = strategy, index, resource, value
        self.seen: dict[RemoteRecord, None] = {}

    def __call__(self, reference: Any) -> Any:
        """The object of this process for a reference."""
        kind, *rest = reference
        if kind == "strategy":
            return self.strategy
        if kind == "tensor":
            tensor = self.strategy.remote_store.adopt_description(rest[0])
            record = find_record(tensor)
            if isinstance(record, RemoteRecord) and record.fixed:
                self.seen[record] = None
            return tensor
        if kind == "optimizer":
            number, parts = rest
            return self.strategy.know_optimizer(number, lambda: _of_worker(*pickling.loads(parts, self)))
        if kind == "resource":
            return self._resource(rest[0])
        if kind == "dataset":
            return pickling.loads(rest[0], self)(self.strategy)
        if kind == "value":
            return self._value(rest[0])
        if kind == "per worker":
            return pickling.loads(PerWorkerValues(rest[0]).for_worker(self.index), self)
        if kind == "made":
            make, description = rest
            return make(self, description)
        if kind == "stays":
            return NotHere(rest[0])
        raise ValueError(f"unknown reference {kind!r}")


class NotHere:
    """Stands for something that only the coordinator's process has; using it raises.

    Args:
        name: what it is there.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, member: str) -> Any:
        if member.startswith("__"):
            raise AttributeError(member)
        raise RuntimeError(
            f"A scheduled function uses {self._name}.{member}, but the {self._name} is in the coordinator's process. "
            "Call it in the program that schedules."
        )
