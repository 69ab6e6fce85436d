"""What the worker and ps tasks do for a Keras model: compute its steps, and apply its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tfstyle_dist.coordinator.current_worker import experimental_get_current_worker_index
from tfstyle_dist.input.options import InputContext
from tfstyle_dist.integrations.keras.backend import keras, process_seeds
from tfstyle_dist.integrations.keras.server_optimizer import ServerOptimizer
from tfstyle_dist.integrations.keras.share import APART, CURRENT, Ledger
from tfstyle_dist.integrations.keras.steps import on_replica
from tfstyle_dist.integrations.keras.travel import send_change
from tfstyle_dist.runtime.context import Frame, entered
from tfstyle_dist.strategies.contexts import get_strategy
from tfstyle_dist.strategies.default import default_strategy
from tfstyle_dist.variables import find_record


class Batches:
    """A worker's batches, from the beginning again when they end; made on the worker.

    Args:
        dataset_fn: called with an ``InputContext``; returns an iterable of batches.
        workers: how many there are.
    """

    def __init__(self, dataset_fn: Callable[[InputContext], Any], workers: int) -> None:
        self._stream = self._endless(dataset_fn, InputContext(workers, experimental_get_current_worker_index(), 1))
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


class WorkerModel:
    """A worker's copy of the model, made there: its weights are those that were pulled for the step.

    Args:
        config: of a built, compiled model.
        custom: the classes and functions of the user's own that it names.
    """

    def __init__(self, config: dict[str, Any], custom: dict[str, Any]) -> None:
        with entered(Frame(default_strategy())):  # the copy's own variables are nobody's
            model = keras.saving.deserialize_keras_object(config, custom_objects=custom, safe_mode=False)
        if getattr(model, "optimizer", None) is None:
            raise RuntimeError(
                f"The copy of the {type(model).__name__} on a worker is not compiled: its compile() has arguments of "
                "its own. Give the class get_compile_config() and compile_from_config(), as for saving it, or keep "
                "to the arguments of keras.Model.compile."
            )
        self.model, self._index = model, experimental_get_current_worker_index()
        self._ledger: Ledger | None = None

    def train(self, batch: Any, pulled: Sequence[torch.Tensor], optimizer: ServerOptimizer, steps: int) -> torch.Tensor:
        """One step; sends gradients and the changes of moving statistics to the servers.

        Args:
            batch: this worker's.
            pulled: the values on the servers, in the order of ``model.variables``.
            optimizer: what the servers apply.
            steps: how many were scheduled before this one; what a step reads as ``optimizer.iterations``.

        Returns:
            The number of examples, and the changes of the metrics' state.
        """
        model = self.model
        ledger = self._built(batch)
        seeds = {id(v) for v, rule in ledger.entries if rule == "seed"}
        places = {id(v): tensor for v, tensor in zip(model.variables, pulled, strict=True)}
        began: dict[int, torch.Tensor] = {}  # a push makes what was pulled new
        with torch.no_grad():
            for variable in model.variables:
                if id(variable) not in seeds:
                    variable.value.copy_(places[id(variable)])
                    began[id(variable)] = variable.value.clone()
            model.optimizer.iterations.assign(steps)
        strategy: Any = get_strategy()

        def push(applied: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
            if applied is not model.optimizer:
                raise RuntimeError(
                    f"The step applies gradients with {applied.name!r}, but the servers have the optimizer that "
                    f"compile was given ({model.optimizer.name!r}). Under ParameterServerStrategy use self.optimizer "
                    "alone; for several optimizers write a loop with ClusterCoordinator.schedule."
                )
            pairs = [
                (find_record(places[id(v)]), g.detach()) for g, v in zip(grads, variables, strict=True) if g is not None
            ]
            strategy.push_gradients(optimizer, pairs)

        trackers = {
            id(v) for part in (model._loss_tracker, model._compile_loss) for v in getattr(part, "variables", ())
        }

        def assign(variable: Any, value: torch.Tensor) -> None:
            if id(variable) not in places and id(variable) not in trackers:
                raise RuntimeError(
                    f"The step assigned to the Keras variable {variable.path!r}, which is no variable of the model: on "
                    "a worker of ParameterServerStrategy that would change a copy. Make it with model.add_weight, or "
                    "assign to it in a callback."
                )
            with torch.no_grad():
                variable.value.copy_(value)

        process_seeds()
        CURRENT.push, CURRENT.assign = push, assign
        model.train()
        try:
            _, told, scope = on_replica(batch, model.train_step, ledger, 0, ledger.begin(0))
        finally:
            CURRENT.push = CURRENT.assign = None
        scope.advance_seeds()
        ledger.settle(told[1 : 1 + ledger.numel], float(told[0]))
        with torch.no_grad():
            for variable in model.variables:
                before = began.get(id(variable))
                if before is None or torch.equal(variable.value, before):
                    continue
                send_change(places[id(variable)], before, variable.value)
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
    model: WorkerModel, batches: Batches, pulled: Sequence[torch.Tensor], optimizer: ServerOptimizer, steps: int
) -> torch.Tensor:
    """The function that is scheduled for each step."""
    return model.train(batches.next(), pulled, optimizer, steps)


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
