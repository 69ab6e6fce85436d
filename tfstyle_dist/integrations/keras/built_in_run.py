"""Layers that are built by their first call: in ``strategy.run`` their variables become the strategy's there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.integrations.keras.wrapping import wrap
from tfstyle_dist.runtime.context import current_replica


def install() -> None:
    """Lets every layer say when it was built."""
    wrap(keras.layers.Layer, "_post_build", _post_build)
    wrap(keras.layers.Layer, "_post_track_variable", _post_track_variable)
    wrap(keras.layers.Layer, "_track_variables", _track_variables)


def _post_build(original: Callable[[Any], None], layer: Any) -> None:
    original(layer)
    replica = current_replica()
    if replica is None or not replica.strategy.adopts_modules:
        return
    store = replica.strategy.parameter_store
    for variable in layer.variables:
        store.adopt_parameter(variable.value, None, variable.path)
    store.ensure_equal()
    store.prepare(None, (layer,))  # the other replicas of this process find it built


def _post_track_variable(original: Callable[[Any, Any], None], layer: Any, variable: Any) -> None:
    """A variable without a value, as while Keras computes shapes, would be registered as one of the meta device."""
    if variable._value is not None:
        original(layer, variable)
    elif hasattr(layer, "_torch_params"):
        del layer._torch_params  # made again when it is asked for


def _track_variables(original: Callable[[Any], None], layer: Any) -> None:
    """Who asks for the parameters meanwhile, as a scope does, gets none."""
    if all(variable._value is not None for variable in layer.variables):
        original(layer)
