"""``DistributedDataParallel`` around a model of a strategy, which would sum its gradients a second time.

Or around any other model, whose process group a strategy may have made.
"""

from __future__ import annotations

import weakref
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


_wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Those that were made while a strategy lived."""


def _owner_of(module: torch.nn.Module) -> ParameterStore | None:
    """The store of a strategy that reduces the gradients of the module's parameters."""
    reducing = [store for store in list(live_stores) if _reduces(store)]
    return next((store for store in reducing if any(store.owns(p) for p in module.parameters())), None)


def _reduces(store: ParameterStore) -> bool:
    strategy = store.strategy
    return strategy is not None and not strategy.closed and strategy.gradient_reducer is not None


def _wrap(original: Any, wrapper: DistributedDataParallel, *args: Any, **options: Any) -> None:
    """The constructor; which parameters are the strategy's is known when it has registered the model."""
    original(wrapper, *args, **options)
    leave_group_to_python(wrapper)
    _wrappers.add(wrapper)
    store = _owner_of(wrapper.module)
    if store is not None:
        _check(wrapper, store)


def _copy(original: Any, wrapper: DistributedDataParallel, state: Any) -> None:
    original(wrapper, state)
    leave_group_to_python(wrapper)
    _wrappers.add(wrapper)


def leave_group_to_python(wrapper: DistributedDataParallel) -> None:
    """Makes Python hold the last reference to the process group of a wrapper.

    A wrapper that holds the last one, because its strategy was closed before it, frees the group while it has Python's
    global lock. A thread of Gloo that at that moment wants the lock, to let go of the tensors of the last call, would
    never get it, and both would wait for ever. Python's own reference is given up without the lock.

    Args:
        wrapper: of any process group.
    """
    for holder in (wrapper.reducer, wrapper.logger):
        weakref.finalize(holder, id, wrapper.process_group).atexit = False  # it is called after the holder was freed


def check_adopted(store: ParameterStore, module: torch.nn.Module) -> None:
    """Looks for wrappers around a module, or in it, that a strategy is about to take over.

    Raises:
        ValueError: the gradients are views of a wrapper's buckets.
    """
    if not _reduces(store):
        return
    own = {id(parameter) for parameter in module.parameters()}
    within = {m for m in module.modules() if isinstance(m, DistributedDataParallel)}
    for wrapper in within | {w for w in _wrappers if any(id(p) in own for p in w.module.parameters())}:
        _check(wrapper, store)


def _check(wrapper: DistributedDataParallel, store: ParameterStore) -> None:
    """Raises where gradients are views of the wrapper's buckets, in which the two sums do not add up; else warns."""
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


wrapped_models = [
    Patch(DistributedDataParallel, "__init__", _wrap),
    Patch(DistributedDataParallel, "__setstate__", _copy),
]
"""As long as a strategy lives."""
