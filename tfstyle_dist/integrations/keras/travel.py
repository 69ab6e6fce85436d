"""Keras objects in functions that a ``ClusterCoordinator`` schedules.

Their variables stay on the servers. A worker makes its own model, metric or optimizer from the configuration once, over
its local copies of those variables, which are pulled before each function; what the function writes to them is added
on the servers, and ``apply`` sends gradients there.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tfstyle_dist.coordinator import references
from tfstyle_dist.coordinator.references import Incoming, Outgoing
from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.integrations.keras.server_optimizer import know, on_servers
from tfstyle_dist.integrations.keras.share import APART, is_seed
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.parameter_server.protocol import pickling
from tfstyle_dist.parameter_server.protocol.operations import Op
from tfstyle_dist.runtime.context import Frame, entered
from tfstyle_dist.strategies.default import default_strategy
from tfstyle_dist.strategies.parameter_server import ParameterServerStrategy
from tfstyle_dist.variables import find_record

_numbers = itertools.count(1)
_numbered = WeakIdKeyDictionary()  # variables of Keras have no hash
_RATE = "tfstyle_rate_of_a_copy"
_made: weakref.WeakKeyDictionary[ParameterServerStrategy, dict[int, Any]] = weakref.WeakKeyDictionary()
"""On a worker: the objects of this process by their number in the coordinator's program."""


def install() -> None:
    """Lets layers, models, optimizers, metrics and variables of Keras be used in scheduled functions."""
    references.register(keras.layers.Layer, _describe_layer)
    references.register(keras.metrics.Metric, _describe_metric)
    references.register(keras.optimizers.Optimizer, _describe_optimizer)
    references.register(keras.Variable, _describe_variable)


def _number(thing: Any) -> int:
    number: int = _numbered.setdefault(thing, next(_numbers))
    return number


def _once(incoming: Incoming, number: int, make: Callable[[], Any]) -> Any:
    known = _made.setdefault(incoming.strategy, {})
    if number not in known:
        known[number] = make()
    return known[number]


def custom_objects(*things: Any) -> dict[str, Any]:
    """Classes and functions of the user's own, by the names that Keras' configurations have for them.

    Args:
        things: classes and functions, or objects of such classes.
    """
    named = [value if isinstance(value, type) or hasattr(value, "__name__") else type(value) for value in things]
    return {n.__name__: n for n in named if not getattr(n, "__module__", "keras.").startswith(("keras.", "builtins"))}


def custom_objects_of(model: Any) -> dict[str, Any]:
    """Those that a model's configuration names."""
    compiled = getattr(getattr(model, "_compile_config", None), "config", {})
    return custom_objects(*model._flatten_layers(), *keras.tree.flatten(list(compiled.values())))


def _tensors(outgoing: Outgoing, variables: Sequence[Any]) -> list[torch.Tensor]:
    """The values of variables, on the servers from now on."""
    store = outgoing.strategy.remote_store
    for variable in variables:
        if find_record(variable._value) is None:
            store.adopt_parameter(variable._value, None, variable.path)
    return [variable._value for variable in variables]


def _bind(what: str, variables: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
    """Lets this process' variables be those of the servers."""
    shapes = [tuple(v.shape) for v in variables], [tuple(t.shape) for t in tensors]
    if shapes[0] != shapes[1]:
        raise RuntimeError(
            f"{what} was made on a worker from its configuration with variables of the shapes {shapes[0]}, but in the "
            f"coordinator's program they have {shapes[1]}. Give its class get_config and build methods that make the "
            "same variables, or make it inside the scheduled function."
        )
    for variable, tensor in zip(variables, tensors, strict=True):
        variable._value = tensor


def write_on_servers(variable: Any, value: torch.Tensor) -> bool:
    """In a scheduled function: adds what an assignment changes to the value on the servers, and writes it here too.

    Args:
        variable: of Keras.
        value: its new value.

    Returns:
        Whether it is such a variable: then nothing else is to be done.

    Raises:
        RuntimeError: it is the learning rate of a worker's own optimizer, of which the servers hear nothing.
    """
    if getattr(variable, _RATE, False):
        raise RuntimeError(
            f"A scheduled function sets {variable.path!r}, but the servers take the learning rate from the "
            "coordinator's program. Set optimizer.learning_rate there, between the functions."
        )
    record = find_record(variable._value)
    if not isinstance(record, RemoteRecord) or not record.fixed:
        return False
    store: Any = record.store
    local = variable._value
    with torch.no_grad():
        if local.dtype is torch.bool:
            store.servers.write(record, Op.ASSIGN, value)
        else:
            store.servers.write(record, Op.ADD, value.to(local.dtype) - local.detach())
        local.copy_(value)
    record.settle(record.baseline is not None)
    return True


# ---- layers and models ----------------------------------------------------------------------------------------------


def _describe_layer(layer: Any, outgoing: Outgoing) -> Any:
    if any(not inner.built for inner in layer._flatten_layers()):
        raise ValueError(
            f"A scheduled function uses {layer.name!r}, which is not built yet: each worker would make weights of its "
            "own. Build it in strategy.scope(): give it an Input, or call build(shape), or call it once."
        )
    shared = [v for v in layer.variables if not is_seed(v)]
    optimizer = getattr(layer, "optimizer", None)
    losses = getattr(getattr(layer, "_loss_tracker", None), "variables", [])
    config = keras.saving.serialize_keras_object(layer)
    description = (config, custom_objects_of(layer), _tensors(outgoing, shared), _tensors(outgoing, losses), optimizer)
    return make_layer, (_number(layer), [bytes(p) for p in pickling.dumps(description, outgoing)])


def make_layer(incoming: Incoming, description: Any) -> Any:
    """A worker's own layer or model."""
    number, parts = description
    config, custom, tensors, losses, optimizer = pickling.loads(parts, incoming)  # also tells what is to be pulled

    def make() -> Any:
        with entered(Frame(default_strategy())):  # what is made here and now is nobody's
            layer = keras.saving.deserialize_keras_object(config, custom_objects=custom, safe_mode=False)
            _bind(f"The {type(layer).__name__} {layer.name!r}", [v for v in layer.variables if not is_seed(v)], tensors)
            for inner in layer._flatten_layers():
                inner._track_variables()
            for seed in filter(is_seed, layer.variables):
                seed.assign([(int(seed.value[0]) + incoming.index * APART) % 2**31, int(seed.value[1])])
        if optimizer is not None:
            layer.optimizer = optimizer
            _bind("The tracker of the loss", layer._loss_tracker.variables, losses)
            if layer._compile_metrics is not None:
                layer._compile_metrics.update_state = _metrics_in_the_scope
        return layer

    return _once(incoming, number, make)


def _metrics_in_the_scope(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "compute_metrics in a scheduled function: the metrics that compile was given belong to fit, and each worker "
        "would count for itself. Make the metric in strategy.scope(), e.g. metric = keras.metrics.Mean(), and call its "
        "update_state in the function."
    )


# ---- metrics, optimizers, variables ---------------------------------------------------------------------------------


def _describe_metric(metric: Any, outgoing: Outgoing) -> Any:
    config = keras.saving.serialize_keras_object(metric)
    custom = custom_objects(metric, *vars(metric).values())
    description = (config, custom, _tensors(outgoing, metric.variables))
    return make_metric, (_number(metric), [bytes(p) for p in pickling.dumps(description, outgoing)])


def make_metric(incoming: Incoming, description: Any) -> Any:
    """A worker's own metric; what it counts is added on the servers."""
    number, parts = description
    config, custom, tensors = pickling.loads(parts, incoming)

    def make() -> Any:
        with entered(Frame(default_strategy())):
            metric = keras.saving.deserialize_keras_object(config, custom_objects=custom, safe_mode=False)
            _bind(f"The metric {metric.name!r}", metric.variables, tensors)
        return metric

    return _once(incoming, number, make)


def _describe_optimizer(optimizer: Any, outgoing: Outgoing) -> Any:
    return make_optimizer, (_number(optimizer), [bytes(p) for p in pickling.dumps(on_servers(optimizer), outgoing)])


def make_optimizer(incoming: Incoming, description: Any) -> Any:
    """A worker's own optimizer; its ``apply`` sends gradients to the servers."""
    number, parts = description
    server = pickling.loads(parts, incoming)

    def make() -> Any:
        with entered(Frame(default_strategy())):
            optimizer = server.make()
        know(optimizer, server)
        if isinstance(optimizer._learning_rate, keras.Variable):
            setattr(optimizer._learning_rate, _RATE, True)
        return optimizer

    return _once(incoming, number, make)


def _describe_variable(variable: Any, outgoing: Outgoing) -> Any:
    description = (_tensors(outgoing, [variable])[0], variable.name, variable.trainable)
    return make_variable, (_number(variable), [bytes(p) for p in pickling.dumps(description, outgoing)])


def make_variable(incoming: Incoming, description: Any) -> Any:
    """A worker's own variable over its copy of the servers' value."""
    number, parts = description
    tensor, name, trainable = pickling.loads(parts, incoming)

    def make() -> Any:
        with entered(Frame(default_strategy())):
            variable = keras.Variable(tensor, trainable=trainable, name=name)
        if is_seed(variable):
            variable.assign([(int(tensor[0]) + incoming.index * APART) % 2**31, int(tensor[1])])
        else:
            _bind(f"The variable {name!r}", [variable], [tensor])
        return variable

    return _once(incoming, number, make)
