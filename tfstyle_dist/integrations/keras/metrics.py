"""Metrics that a step function of the user's own updates: a replica without examples changes none."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tfstyle_dist.integrations.keras import metric_state
from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.integrations.keras.share import CURRENT
from tfstyle_dist.runtime.context import current_frame


def install() -> None:
    """Lets the class of every metric that is made from now on know of shares."""
    original = keras.metrics.Metric.__init__
    if hasattr(original, "tfstyle_original"):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        owners: Sequence[Any] = type(self).__mro__
        for owner in owners:
            update = vars(owner).get("update_state")
            if update is not None and not hasattr(update, "tfstyle_original"):
                owner.update_state = _of_examples(update)

    init.tfstyle_original = original  # type: ignore[attr-defined]
    keras.metrics.Metric.__init__ = init


def _of_examples(original: Any) -> Any:
    @functools.wraps(original)
    def update_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        frame = current_frame()
        if frame is None or frame.replica is None or CURRENT.count is not None:  # fit counts for itself
            return original(self, *args, **kwargs)
        share = frame.replica.share
        if share is not None and share.examples == 0:
            for variable in self.variables:  # as the replicas with examples do
                metric_state.adopt(variable, frame.strategy)
            return None
        return original(self, *args, **kwargs)

    update_state.tfstyle_original = original  # type: ignore[attr-defined]
    return update_state
