"""Keras objects in functions that a ``ClusterCoordinator`` schedules.

Their variables stay on the servers. A worker makes its own model, metric or optimizer from the configuration once, over
its local copies of those variables, which are pulled before each function; what the function writes to them is added
on the servers, and ``apply`` sends gradients there.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
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
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy
from tfstyle_dist.variables import find_record

_numbers = itertools.count(1)
_numbered = WeakIdKeyDictionary()  # variables of Keras have no hash
_RATE = "tfstyle_rate_of_a_copy"
_made: weakref.WeakKeyDictionary[ParameterServerStrategy, dict[int, Any]] = weakref.WeakKeyDictionary()
"""On a worker: the objects of this process by their number in the coordinator's program."""


def install() -> None:
    """Lets layers, models, optimizers, metrics and variables of Keras be used in scheduled functions."""
    references.register(keras.layers.Layer, partial(_describe, _layer_told, _make_layer))
    references.register(keras.metrics.Metric, partial(_describe, _metric_told, _make_metric))
    references.register(keras.optimizers.Optimizer, partial(_describe, _optimizer_told, _make_optimizer))
    references.register(keras.Variable, partial(_describe, _variable_told, _make_variable))


def _number(thing: Any) -> int:
    number: int = _numbered.setdefault(thing, next(_numbers))
    return number


def _describe(tell: Callable[..., Any], make: Callable[..., Any], thing: Any, outgoing: Outgoing) -> Any:
    """What stands for an object: its number, and from what ``make`` makes a worker's own one."""
    told = tell(thing, outgoing)
    return own_object, (make, _number(thing), [bytes(p) for p in pickling.dumps(told, outgoing)])


def own_object(incoming: Incoming, description: Any) -> Any:
    """A worker's own layer, metric, optimizer or variable, made when a function first refers to it."""
    make, number, parts = description
    told = pickling.loads(parts, incoming)  # each time: it also tells what is to be pulled
    known = _made.setdefault(incoming.strategy, {})
    if number not in known:
        with entered(Frame(default_strategy())):  # what is made here and now is nobody's
            known[number] = make(incoming, *told)
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
    local = variable._value
    with torch.no_grad():
        send_change(local, local.detach(), value.to(local.dtype))
        local.copy_(value)
    record.settle(record.baseline is not None)
    return True


def send_change(tensor: torch.Tensor, before: torch.Tensor, now: torch.Tensor) -> None:
    """Adds what has changed to the value on the servers; of truth values the new ones are written.

    Args:
        tensor: what stands for that value here.
        before: what it was.
        now: what it is to be.
    """
    record: Any = find_record(tensor)
    if now.dtype is torch.bool:
        record.store.servers.write(record, Op.ASSIGN, now)
    else:
        record.store.servers.write(record, Op.ADD, now - before)


# ---- layers and models ----------------------------------------------------------------------------------------------


def _layer_told(layer: Any, outgoing: Outgoing) -> Any:
    if any(not inner.built for inner in layer._flatten_layers()):
        raise ValueError(
            f"A scheduled function uses {layer.name!r}, which is not built yet: each worker would make weights of its "
            "own. Build it in strategy.scope(): give it an Input, or call build(shape), or call it once."
        )
    shared = [v for v in layer.variables if not is_seed(v)]
    optimizer = getattr(layer, "optimizer", None)
    losses = getattr(getattr(layer, "_loss_tracker", None), "variables", [])
    config = keras.saving.serialize_keras_object(layer)
    return config, custom_objects_of(layer), _tensors(outgoing, shared), _tensors(outgoing, losses), optimizer


def _make_layer(incoming: Incoming, config: Any, custom: Any, tensors: Any, losses: Any, optimizer: Any) -> Any:
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


def _metrics_in_the_scope(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "compute_metrics in a scheduled function: the metrics that compile was given belong to fit, and each worker "
        "would count for itself. Make the metric in strategy.scope(), e.g. metric = keras.metrics.Mean(), and call its "
        "update_state in the function."
    )


# ---- metrics, optimizers, variables ---------------------------------------------------------------------------------


def _metric_told(metric: Any, outgoing: Outgoing) -> Any:
    config = keras.saving.serialize_keras_object(metric)
    return config, custom_objects(metric, *vars(metric).values()), _tensors(outgoing, metric.variables)


def _make_metric(incoming: Incoming, config: Any, custom: Any, tensors: Any) -> Any:
    """What it counts is added on the servers."""
    metric = keras.saving.deserialize_keras_object(config, custom_objects=custom, safe_mode=False)
    _bind(f"The metric {metric.name!r}", metric.variables, tensors)
    return metric


def _optimizer_told(optimizer: Any, outgoing: Outgoing) -> Any:
    return (on_servers(optimizer),)


def _make_optimizer(incoming: Incoming, server: Any) -> Any:
    """Its ``apply`` sends gradients to the servers."""
    optimizer = server.make()
    know(optimizer, server)
    if isinstance(optimizer._learning_rate, keras.Variable):
        setattr(optimizer._learning_rate, _RATE, True)
    return optimizer


def _variable_told(variable: Any, outgoing: Outgoing) -> Any:
    return _tensors(outgoing, [variable])[0], variable.name, variable.trainable


def _make_variable(incoming: Incoming, tensor: Any, name: str, trainable: bool) -> Any:
    """Over this process's copy of the servers' value."""
    variable = keras.Variable(tensor, trainable=trainable, name=name)
    if is_seed(variable):
        variable.assign([(int(tensor[0]) + incoming.index * APART) % 2**31, int(tensor[1])])
    else:
        _bind(f"The variable {name!r}", [variable], [tensor])
    return variable
