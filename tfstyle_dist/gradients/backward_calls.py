"""The calls of autograd's engine: ``backward()`` in all its forms, and ``torch.autograd.grad``.

While a strategy that adopts modules lives, they run in the thread that makes them, on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.devices import any_accelerator
from tfstyle_dist.core.process_hooks import Patch
from tfstyle_dist.core.untraced import untraced
from tfstyle_dist.gradients.backward_pass import PassReducer
from tfstyle_dist.gradients.by_examples import weighed_by_examples
from tfstyle_dist.gradients.divided_losses import note_pass
from tfstyle_dist.gradients.exchanges.replicas import ReplicaReducer
from tfstyle_dist.gradients.local_gradients import note_local
from tfstyle_dist.gradients.of_no_replica import (
    check_thread,
    lost_graph_explained,
    say_keras_knows_nothing,
    say_left_alone,
)
from tfstyle_dist.runtime.context import current_frame
from tfstyle_dist.variables.store import live_stores

_CREATE_GRAPH = 3  # its place among the arguments of the engine


@untraced
def _run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Autograd has a thread for each device, which all replicas of that device would share: one that waits there for
    # another would wait for ever, and hooks would not know whose they are. So a pass runs in the thread that began it.
    if any_accelerator():
        with torch.autograd.set_multithreading_enabled(False):
            return _run_here(original, *args, **kwargs)
    return _run_here(original, *args, **kwargs)


def _run_here(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    frame = current_frame()
    replica = None if frame is None else frame.replica
    if frame is None and ReplicaReducer.alive and torch_internals.backward_pass_under_way() == -1:
        check_thread(args[0])
    if torch_internals.backward_pass_under_way() != -1:  # a segment of reentrant checkpointing
        return original(*args, **kwargs)
    if replica is None:
        if kwargs.get("accumulate_grad", True):
            say_left_alone(args[0])
            say_keras_knows_nothing()
        keeps = args[_CREATE_GRAPH] and kwargs.get("accumulate_grad", True)
        with lost_graph_explained():
            return _keeping_graphs_outside(original, *args, **kwargs) if keeps else original(*args, **kwargs)
    if not kwargs.get("accumulate_grad", True):
        found = original(*args, **kwargs)
        if replica.num_replicas_in_sync > 1:
            note_local(found)
        return found
    note_pass(args[0], args[1], replica)
    if replica.share is not None:
        original = partial(weighed_by_examples, original, replica)
    reducer = replica.strategy.gradient_reducer
    if isinstance(reducer, ReplicaReducer):
        before = reducer.before_pass(replica.local_replica_id)
        found = original(*args, **kwargs)
        reducer.after_pass(replica, before)
        return found
    if args[_CREATE_GRAPH] and isinstance(reducer, PassReducer):
        with reducer.keeping_graphs(replica):
            return original(*args, **kwargs)
    return original(*args, **kwargs)


def _keeping_graphs_outside(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as passes:
        for reducer in _reducers_of_ranks():
            passes.enter_context(reducer.keeping_graphs())
        return original(*args, **kwargs)


def _reducers_of_ranks() -> list[PassReducer]:
    """Those that reduce between processes of one replica each; which of them a pass concerns, its gradients tell."""
    strategies = [s for store in list(live_stores) if (s := store.strategy) is not None]
    reducers = [strategy.gradient_reducer for strategy in strategies]
    return [r for r in reducers if isinstance(r, PassReducer) and r.worker.num_replicas > 1]


engine_calls = Patch(torch.autograd, torch_internals.RUN_BACKWARD, _run)
"""Installed while a strategy that adopts modules lives."""
