"""What the worker and ps tasks do for a Keras model: compute its steps, and apply its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.coordinator.current_worker import experimental_get_current_worker_index
from tfstyle_dist.input.options import InputContext
from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.integrations.keras.server_state import ITERATIONS, slot_variables
from tfstyle_dist.integrations.keras.share import APART, CURRENT, Ledger
from tfstyle_dist.integrations.keras.steps import on_replica
from tfstyle_dist.parameter_server.protocol.operations import Op
from tfstyle_dist.runtime.context import Frame, entered
from tfstyle_dist.strategies.contexts import get_strategy
from tfstyle_dist.strategies.default import default_strategy
from tfstyle_dist.variables import find_record


class ServerOptimizer:
    """A Keras optimizer whose state lives on the ps tasks: each variable there has one of its own.

    Args:
        optimizer: the one the model was compiled with.

    Raises:
        ValueError: it looks at all gradients together, which no server has.
    """

    def __init__(self, optimizer: Any) -> None:
        for name in ("global_clipnorm", "use_ema", "gradient_accumulation_steps", "loss_scale_factor"):
            if getattr(optimizer, name, None):
                raise ValueError(
                    f"{type(optimizer).__name__}({name}={getattr(optimizer, name)!r}) under ParameterServerStrategy: "
                    "each server updates its own variables alone. Leave it out; clipnorm= and clipvalue= work."
                )
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "A LossScaleOptimizer (mixed_float16) looks at all gradients together, but each server updates its own "
                "variables alone. Use float32 or mixed_bfloat16 under ParameterServerStrategy."
            )
        self._config = keras.optimizers.serialize(optimizer)
        self._source: Any = weakref.ref(optimizer)
        self._rate: float | None = None
        self._made: dict[int, tuple[Any, Any]] = {}

    def without_slots(self) -> dict[str, Any]:
        """What travels to the tasks."""
        now = self.hyperparameters()
        rate = None if now is None else now[0]["learning_rate"]
        return {"_config": self._config, "_source": _nobody, "_rate": rate, "_made": {}}

    def hyperparameters(self) -> list[dict[str, Any]] | None:
        """The learning rate as callbacks have set it; ``None`` for a schedule, which the servers follow themselves."""
        source = self._source()
        if source is None or isinstance(self._config["config"].get("learning_rate"), dict):
            return None
        return [{"learning_rate": float(keras.ops.convert_to_numpy(source.learning_rate))}]

    def set_hyperparameters(self, groups: Sequence[dict[str, Any]]) -> None:
        """On a server: takes the learning rate over."""
        self._rate = float(groups[0]["learning_rate"])
        for optimizer, _ in self._made.values():
            optimizer.learning_rate = self._rate

    def update_parameters(self, pairs: Sequence[tuple[torch.Tensor, torch.nn.Parameter]]) -> None:
        """On a server: one step over the variables that live there."""
        for grad, parameter in pairs:
            optimizer, variable = self._of(parameter)
            with torch.no_grad():
                optimizer.apply([grad.to_dense() if grad.is_sparse else grad], [variable])

    def parameter_slots(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """On a server: the state of one variable by name, for snapshots and files; empty before its first update."""
        if id(parameter) not in self._made:
            return {}
        return {name: v.value for name, v in self._slots(parameter).items()}

    def put_parameter_slots(self, parameter: torch.Tensor, slots: Mapping[str, Any]) -> None:
        """On a server: replaces state of one variable."""
        own = self._slots(parameter)
        with torch.no_grad():
            for name, value in slots.items():
                own[name].assign(value)

    def _slots(self, parameter: torch.Tensor) -> dict[str, Any]:
        optimizer, variable = self._of(parameter)
        return {ITERATIONS: optimizer.iterations, **slot_variables(optimizer, variable)}

    def _of(self, parameter: torch.Tensor) -> tuple[Any, Any]:
        """The optimizer of one variable, and the variable as Keras knows it."""
        known = self._made.get(id(parameter))
        if known is None:
            optimizer, variable = keras.optimizers.deserialize(self._config), keras.Variable(parameter)
            optimizer.build([variable])
            if self._rate is not None:
                optimizer.learning_rate = self._rate
            known = self._made[id(parameter)] = (optimizer, variable)
        return known


def _nobody() -> None:
    return None


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
        self._custom = _custom_objects(model)

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


def _custom_objects(model: Any) -> dict[str, Any]:
    """Classes and functions of the user's own that the model's configuration names."""
    compiled = getattr(getattr(model, "_compile_config", None), "config", {})
    named = [type(layer) for layer in model._flatten_layers()]
    for value in keras.tree.flatten(list(compiled.values())):
        named.append(value if isinstance(value, type) or hasattr(value, "__name__") else type(value))
    return {n.__name__: n for n in named if not getattr(n, "__module__", "keras.").startswith(("keras.", "builtins"))}
