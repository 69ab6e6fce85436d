"""What the worker and ps tasks do for a Keras model: compute its steps, and apply its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tfstyle_dist.coordinator.current_worker import experimental_get_current_worker_index
from tfstyle_dist.input.options import InputContext
from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.integrations.keras.server_optimizer import ServerOptimizer
from tfstyle_dist.integrations.keras.share import APART, CURRENT, Ledger
from tfstyle_dist.integrations.keras.steps import on_replica
from tfstyle_dist.integrations.keras.travel import custom_objects_of
from tfstyle_dist.parameter_server.protocol.operations import Op
from tfstyle_dist.runtime.context import Frame, entered
from tfstyle_dist.strategies.contexts import get_strategy
from tfstyle_dist.strategies.default import default_strategy
from tfstyle_dist.variables import find_record


class MakeBatches:
    """Makes a worker's endless stream of batches; travels to the workers.

    Args:
        dataset_fn: called with an ``InputContext``; returns an iterable of batches.
        workers: how many there are.
    """

    def __init__(self, dataset_fn: Callable[[InputContext], Any], workers: int) -> None:
        self._dataset_fn, self._workers = dataset_fn, workers

    def __call__(self) -> Batches:
        """On a worker: its stream."""
        index = experimental_get_current_worker_index()
        return Batches(self._dataset_fn, InputContext(self._workers, index, 1))


class Batches:
    """A worker's batches, from the beginning again when they end."""

    def __init__(self, dataset_fn: Callable[[InputContext], Any], context: InputContext) -> None:
        self._stream = self._endless(dataset_fn, context)
        self._kept: list[Any] = []

    def _endless(self, dataset_fn: Callable[[InputContext], Any], context: InputContext) -> Iterator[Any]:
        while True:
            seen = False
            for batch in dataset_fn(context):
                seen = True
                yield _tensors(batch)
            if not seen:
                raise ValueError("The dataset function returned a dataset without batches.")

    def next(self) -> Any:
        """The next batch."""
        return self._kept.pop() if self._kept else next(self._stream)

    def peek(self) -> Any:
        """The batch that ``next`` will give."""
        if not self._kept:
            self._kept.append(next(self._stream))
        return self._kept[0]


class MakeModel:
    """Makes a worker's copy of the model; travels to the workers.

    Args:
        model: a built, compiled model.
    """

    def __init__(self, model: Any) -> None:
        self._config = keras.saving.serialize_keras_object(model)
        self._custom = custom_objects_of(model)

    def __call__(self) -> WorkerModel:
        """On a worker: its copy."""
        with entered(Frame(default_strategy())):  # the copy's own variables are nobody's
            model = keras.saving.deserialize_keras_object(self._config, custom_objects=self._custom, safe_mode=False)
        return WorkerModel(model, experimental_get_current_worker_index())


class WorkerModel:
    """A worker's copy of the model: its weights are those that were pulled for the step.

    Args:
        model: built and compiled.
        index: number of the worker.
    """

    def __init__(self, model: Any, index: int) -> None:
        self.model, self._index = model, index
        self._ledger: Ledger | None = None

    def train(self, batch: Any, pulled: Sequence[torch.Tensor], optimizer: ServerOptimizer) -> torch.Tensor:
        """One step; sends gradients and the changes of moving statistics to the servers.

        Args:
            batch: this worker's.
            pulled: the values on the servers, in the order of ``model.variables``.
            optimizer: what the servers apply.

        Returns:
            The number of examples, and the changes of the metrics' state.
        """
        model = self.model
        ledger = self._built(batch)
        seeds = {id(v) for v, rule in ledger.entries if rule == "seed"}
        own = list(zip(model.variables, pulled, strict=True))
        places = {id(v): tensor for v, tensor in own}
        with torch.no_grad():
            for variable, tensor in own:
                if id(variable) not in seeds:
                    variable.value.copy_(tensor)
        strategy: Any = get_strategy()

        def push(grads: Sequence[Any], variables: Sequence[Any]) -> None:
            pairs = [
                (find_record(places[id(v)]), g.detach()) for g, v in zip(grads, variables, strict=True) if g is not None
            ]
            strategy.push_gradients(optimizer, pairs)

        CURRENT.push = push
        model.train()
        try:
            _, told = on_replica(batch, model.train_step, ledger, 0)
        finally:
            CURRENT.push = None
        ledger.settle(told[1 : 1 + ledger.numel], float(told[0]))
        with torch.no_grad():
            for variable, rule in ledger.entries:
                if rule == "mean" and id(variable) in places:
                    on_servers = places[id(variable)]
                    strategy.servers.write(find_record(on_servers), Op.ADD, variable.value - on_servers)
        return told[: 1 + metrics_numel(model)]

    def _built(self, batch: Any) -> Ledger:
        if self._ledger is None:
            with entered(Frame(default_strategy())):
                self.model._symbolic_build(data_batch=batch)
                self._ledger = Ledger(self.model, training=True)
            with torch.no_grad():
                for variable, rule in self._ledger.entries:
                    if rule == "seed":
                        variable.value[0] = (int(variable.value[0]) + self._index * APART) % 2**31
        return self._ledger


def train_on_worker(
    model: WorkerModel, batches: Batches, pulled: Sequence[torch.Tensor], optimizer: ServerOptimizer
) -> torch.Tensor:
    """The function that is scheduled for each step."""
    return model.train(batches.next(), pulled, optimizer)


def look_at_batch(batches: Batches) -> Any:
    """The function that tells the coordinator what batches look like."""
    return batches.peek()


def metric_variables(model: Any) -> list[Any]:
    """The variables of a model's metrics, each once."""
    return list({id(v): v for v in model.metrics_variables}.values())


def metrics_numel(model: Any) -> int:
    """How many numbers they hold."""
    return sum(v.value.numel() for v in metric_variables(model))


def _tensors(batch: Any) -> Any:
    batch = tuple(batch) if isinstance(batch, list) else batch
    return keras.tree.map_structure(lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), batch)
