"""``DistributedDataParallel`` around a model of a strategy, which would sum its gradients a second time."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.core.process_hooks import Patch
from tfstyle_dist.variables.store import ParameterStore, live_stores

_INSTEAD = (
    "Leave DistributedDataParallel out: write model for model.module, and strategy.accumulate() for model.no_sync() "
    "(docs/migrating.md)."
)


def _owner_of(module: torch.nn.Module) -> ParameterStore | None:
    """The store of a strategy that reduces the gradients of the module's parameters."""
    reducing = [store for store in list(live_stores) if (s := store.strategy) and not s.closed and s.gradient_reducer]
    return next((store for store in reducing if any(store.owns(p) for p in module.parameters())), None)


def _wrap(original: Any, wrapper: DistributedDataParallel, *args: Any, **options: Any) -> None:
    """The constructor; which parameters are the strategy's is known when it has registered the model.

    Raises:
        ValueError: the gradients would be views of its buckets, where the two sums do not add up.
    """
    original(wrapper, *args, **options)
    store = _owner_of(wrapper.module)
    if store is None:
        return
    given = (
        f"DistributedDataParallel was given a {type(wrapper.module).__name__} of {type(store.strategy).__name__}, "
        "which sums its gradients itself"
    )
    if wrapper.gradient_as_bucket_view:
        raise ValueError(
            f"{given}; with gradient_as_bucket_view=True both would write to the same memory, and gradients that are "
            f"accumulated would be wrong. {_INSTEAD}"
        )
    warn_once(
        "DistributedDataParallel around a model of a strategy",
        f"{given}: they are now sent and averaged twice. With equal shares that costs time alone; the gradient of an "
        f"empty share, which the strategy leaves out, reaches the other workers. {_INSTEAD}",
    )


wrapped_models = Patch(DistributedDataParallel, "__init__", _wrap)
"""As long as a strategy lives."""
