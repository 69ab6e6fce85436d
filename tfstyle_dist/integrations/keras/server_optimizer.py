"""Keras optimizers whose state lives on the ps tasks: what the servers apply, and what sends them gradients."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.integrations.keras.server_state import ITERATIONS, StateOnServers, slot_variables, state_of
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
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

    def make(self) -> Any:
        """An optimizer of Keras with these settings."""
        return keras.optimizers.deserialize(self._config)

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
            optimizer, variable = self.make(), keras.Variable(parameter)
            optimizer.build([variable])
            if self._rate is not None:
                optimizer.learning_rate = self._rate
            known = self._made[id(parameter)] = (optimizer, variable)
        return known


def _nobody() -> None:
    return None


# The servers keep the state of these: a later fit or function goes on with it.
_known: weakref.WeakKeyDictionary[Any, ServerOptimizer] = weakref.WeakKeyDictionary()


def on_servers(optimizer: Any) -> ServerOptimizer:
    """What the servers know a Keras optimizer as; always the same.

    Raises:
        ValueError: it looks at all gradients together, which no server has.
    """
    found = _known.get(optimizer)
    if found is None:
        found = _known[optimizer] = ServerOptimizer(optimizer)
    return found


def know(optimizer: Any, server: ServerOptimizer) -> None:
    """On a worker: an optimizer of this process stands for one of the coordinator's program."""
    _known[optimizer] = server


def is_remote(variables: Sequence[Any]) -> bool:
    """Whether some of the variables live on parameter servers."""
    return any(isinstance(find_record(v._value), RemoteRecord) for v in variables)


def push(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """``apply`` of variables on parameter servers: sends the gradients, the step is made there.

    Raises:
        RuntimeError: a variable that is not on the servers.
    """
    pairs = []
    for grad, variable in zip(grads, variables, strict=True):
        record = find_record(variable._value)
        if not isinstance(record, RemoteRecord):
            raise RuntimeError(
                f"{optimizer.name}.apply got {variable.path!r}, which is not on the parameter servers like the others. "
                "Build the whole model in strategy.scope()."
            )
        if grad is not None:
            pairs.append((record, grad.detach()))
    if pairs:
        strategy: Any = pairs[0][0].store.strategy
        if strategy.cluster_resolver is None and optimizer not in _known:
            raise RuntimeError(
                f"{optimizer.name} was made inside a scheduled function, where the servers do not know it. Make "
                "optimizers in the coordinator's program, outside of functions."
            )
        strategy.push_gradients(on_servers(optimizer), pairs)
    with torch.no_grad():
        optimizer.iterations.assign_add(1)


def state_on_servers(optimizer: Any, variables: Sequence[Any]) -> StateOnServers | None:
    """What the servers keep for an optimizer; ``None`` where the variables are not on servers.

    Args:
        optimizer: of Keras, in the coordinator's program; it is built if it is not.
        variables: of the model that it trains.
    """
    if not is_remote(variables):
        return None
    if not optimizer.built:
        optimizer.build(variables)
    record: Any = find_record(variables[0]._value)
    return state_of(record.store.strategy, on_servers(optimizer), optimizer, variables)
