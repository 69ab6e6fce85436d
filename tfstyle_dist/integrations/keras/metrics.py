"""Metrics that a step function of the user's own updates: a replica without examples changes none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfstyle_dist.integrations.keras import metric_state
from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.integrations.keras.share import CURRENT
from tfstyle_dist.integrations.keras.wrapping import wrap
from tfstyle_dist.runtime.context import current_frame


def install() -> None:
    """Lets the class of every metric that is made from now on know of shares."""
    wrap(keras.metrics.Metric, "__init__", _init)


def _init(original: Callable[..., None], metric: Any, *args: Any, **kwargs: Any) -> None:
    original(metric, *args, **kwargs)
    for owner in type(metric).__mro__:
        if "update_state" in vars(owner):
            wrap(owner, "update_state", _update_state)


def _update_state(original: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any) -> Any:
    frame = current_frame()
    if frame is None or frame.replica is None or CURRENT.count is not None:  # fit counts for itself
        return original(metric, *args, **kwargs)
    share = frame.replica.share
    if share is not None and share.examples == 0:
        for variable in metric.variables:  # as the replicas with examples do
            metric_state.adopt(variable, frame.strategy)
        return None
    return original(metric, *args, **kwargs)
