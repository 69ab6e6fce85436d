"""Backward passes of no replica, whose gradients nobody reduces: outside of ``run``, or in a step's own thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.core.program_line import stack_from
from tfstyle_dist.gradients.by_examples import leaves_of
from tfstyle_dist.gradients.exchanges.replicas import ReplicaReducer
from tfstyle_dist.variables.store import live_stores

_KERAS = "tfstyle_dist.integrations.keras"
_KERAS_TRAINER = "keras.src.backend.torch.trainer"


def check_thread(roots: Any) -> None:
    """Refuses a pass that would leave gradients of one replica with a strategy's parameters.

    Args:
        roots: the tensors that are differentiated, in a thread that no strategy runs.

    Raises:
        RuntimeError: they depend on parameters of a strategy whose replicas run in this process now.
    """
    for reducer in list(ReplicaReducer.alive):
        contents = reducer.store.contents
        if contents is None or contents.active is None:
            continue
        if _reaches_parameters(roots, reducer):
            raise RuntimeError(
                f"backward() was called in the thread {threading.current_thread().name!r} while strategy.run is under "
                "way in another one. The replicas of one process wait for each other at the end of backward(), in the "
                "thread of each, so these gradients would stay those of one replica. Compute the loss in threads if "
                "you like, and call backward() in the step function itself, or start one process for each replica "
                "(torchrun)."
            )


def say_left_alone(roots: Any) -> None:
    """Warns, once, of a pass outside of ``run`` that leaves each of several workers with gradients of its own.

    Args:
        roots: the tensors that are differentiated, in cross-replica context.
    """
    for reducer in list(ReplicaReducer.alive):
        workers, replicas = reducer.worker.group.size, reducer.worker.num_local_replicas
        if workers > 1 and replicas > 1 and _reaches_parameters(roots, reducer):
            warn_once(
                "a backward pass outside of run",
                "backward() was called outside of strategy.run(...), on a model of a strategy with "
                f"{workers} workers of {replicas} replicas each. Nothing is summed between the workers there, so an "
                "update with these gradients leaves each worker with weights of its own. Call the step by "
                "strategy.run(step, args=...), or start one process for each replica, which sums in a loop of your own "
                "too (docs/migrating.md).",
            )


def say_keras_knows_nothing() -> None:
    """Warns, once, of ``fit`` of a Keras model in a program that does not import what lets Keras know strategies.

    A model that its first batch builds belongs to no strategy then, so it is not asked for.
    """
    if "keras" not in sys.modules or _KERAS in sys.modules:
        return
    if not any(one.f_globals.get("__name__") == _KERAS_TRAINER for one in stack_from(sys._getframe())):
        return
    strategies = [s for store in list(live_stores) if (s := store.strategy) is not None]
    for strategy in strategies:
        if strategy.num_replicas_in_sync > 1:
            warn_once(
                "keras without its integration",
                "fit() of a Keras model trains as if there were one device: each process computes the whole batch. If "
                f"the model was made in the scope of {strategy!r}, write 'import {_KERAS}' before that; from there on "
                "fit, evaluate and predict divide each batch between the replicas (docs/keras.md).",
            )


@contextmanager
def lost_graph_explained() -> Iterator[None]:
    """Adds to the error about a root without a graph that results of ``reduce`` and ``gather`` have none."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" in str(error):
            error.add_note(
                "[tfstyle_dist] backward() was called outside of strategy.run, where what strategy.reduce and "
                "strategy.gather return has no graph. Call loss.backward() and optimizer.step() in the function that "
                "strategy.run gets, and reduce the loss that it returns to show it."
            )
        raise


def _reaches_parameters(roots: Any, reducer: ReplicaReducer) -> bool:
    reached = leaves_of((roots,) if isinstance(roots, torch.Tensor) else roots)
    parameters = {id(record.tensor) for record in reducer.store.records()}
    return any(id(leaf) in parameters for leaf in reached)
