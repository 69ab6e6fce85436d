"""What several replicas cannot do with a Keras model, and what to write instead."""

from __future__ import annotations

from typing import Any

from tfstyle_dist.input.iterator import DistributedIterator
from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.integrations.keras.share import CURRENT
from tfstyle_dist.runtime.context import current_replica
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy
from tfstyle_dist.values import DistributedValues


def refuse_training_in_run(model: Any, method: str) -> None:
    """Keras' own training belongs outside of ``strategy.run``: it takes a global batch.

    Args:
        model: a Keras model.
        method: that was called.

    Raises:
        RuntimeError: a replica of several calls it, other than for ``fit``.
    """
    replica = current_replica()
    if replica is None or CURRENT.count is not None:
        return
    strategy = replica.strategy
    if strategy.num_replicas_in_sync == 1 or isinstance(strategy, ParameterServerStrategy):
        return
    raise RuntimeError(
        f"{type(model).__name__}.{method} was called inside of strategy.run, by each of "
        f"{strategy.num_replicas_in_sync} replicas: its loss is a mean over the replica's share, and the optimizer "
        "adds up the gradients of all. Call fit or train_on_batch outside of strategy.run, with the global batch. Or "
        "write the step with loss.backward() and the optimizer, and divide the loss by the global batch "
        "(tfd.nn.compute_average_loss)."
    )


def refuse_stateful(model: Any, replicas: int) -> None:
    """A layer that remembers the examples of a batch would have to see the same share of each batch.

    Args:
        model: a Keras model.
        replicas: over how many a batch is divided.

    Raises:
        NotImplementedError: the model has a recurrent layer with ``stateful=True``.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) and hasattr(layer, "states"):
            raise NotImplementedError(
                f"The layer {layer.name!r} ({type(layer).__name__}) was made with stateful=True, which is not possible "
                f"with {replicas} replicas: a batch is divided among them, and the states belong to whole batches. "
                "Leave stateful out and give the layer its initial_state, or use a strategy with one replica."
            )


def refuse_divided(method: str, given: Any) -> None:
    """A batch that is divided already is for ``strategy.run``; Keras' methods divide what they are given.

    Args:
        method: that was called.
        given: its arguments, in any nest.

    Raises:
        ValueError: one of them is a ``PerReplica``, or an iterator over such.
    """
    for leaf in keras.tree.flatten(given):
        if isinstance(leaf, DistributedValues | DistributedIterator):
            one = method.endswith("_on_batch")
            instead = "the global batch, undivided" if one else "the distributed dataset itself, or the data undivided"
            raise ValueError(
                f"{method} was given a {type(leaf).__name__}, which is divided among the replicas already: {method} "
                f"divides what it is given. Give it {instead}; or call the model in strategy.run."
            )
