"""Layers that are built by their first call inside ``strategy.run``: their variables become the strategy's there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.integrations.keras.wrapping import wrap
from tfstyle_dist.runtime.context import current_frame


def install() -> None:
    """Lets every layer say when it was built."""
    wrap(keras.layers.Layer, "_post_build", _post_build)


def _post_build(original: Callable[[Any], None], layer: Any) -> None:
    original(layer)
    frame = current_frame()
    if frame is None or frame.replica is None or not frame.strategy.adopts_modules:
        return
    store = frame.strategy.parameter_store
    for variable in layer.variables:
        store.adopt_parameter(variable.value, None, variable.path)
    store.ensure_equal()
    store.prepare(None, (layer,))  # the other replicas of this process find it built
