"""Layers that are built by their first call inside ``strategy.run``: their variables become the strategy's there."""

from __future__ import annotations

import functools
from typing import Any

from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.runtime.context import current_frame


def install() -> None:
    """Lets every layer say when it was built."""
    owner = next(c for c in keras.layers.Layer.__mro__ if "_post_build" in vars(c))
    if not hasattr(owner._post_build, "tfstyle_original"):
        owner._post_build = _telling(owner._post_build)


def _telling(original: Any) -> Any:
    @functools.wraps(original)
    def post_build(self: Any) -> None:
        original(self)
        frame = current_frame()
        if frame is None or frame.replica is None or not frame.strategy.adopts_modules:
            return
        store = frame.strategy.parameter_store
        for variable in self.variables:
            store.adopt_parameter(variable.value, None, variable.path)
        store.ensure_equal()
        store.prepare(None, (self,))  # the other replicas of this process find it built

    post_build.tfstyle_original = original  # type: ignore[attr-defined]
    return post_build
