"""The module functions of ``tf.distribute`` about the context in force."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tfstyle_dist.runtime.context import current_frame, current_replica, set_global_strategy
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.default import default_strategy
from tfstyle_dist.variables.adoption import registrations

if TYPE_CHECKING:
    from tfstyle_dist.strategies.replica_context import ReplicaContext

_global: Any = None


def get_strategy() -> Strategy:
    """The strategy in force: the innermost scope's or run's, else the global one, else the default strategy.

    Source: ``tf.distribute.get_strategy``.

    Example:
        >>> get_strategy().num_replicas_in_sync
        1
    """
    frame = current_frame()
    return default_strategy() if frame is None else cast("Strategy", frame.strategy)


def has_strategy() -> bool:
    """Whether another strategy than the default one is in force (``tf.distribute.has_strategy``).

    Example:
        >>> with strategy.scope():
        ...     has_strategy()
        True
    """
    frame = current_frame()
    return frame is not None and frame.strategy is not default_strategy()


def get_replica_context() -> ReplicaContext | None:
    """The replica context of this thread; ``None`` in cross-replica context.

    Outside every strategy it is the default strategy's context. Source: ``tf.distribute.get_replica_context``.

    Example:
        >>> strategy.run(lambda: get_replica_context().all_reduce("SUM", torch.ones(2)))
    """
    frame = current_frame()
    if frame is None:
        return default_strategy().replica_context
    return cast("ReplicaContext | None", frame.replica)


def in_cross_replica_context() -> bool:
    """Whether this thread is in cross-replica context (``tf.distribute.in_cross_replica_context``).

    Outside every strategy it is false, as in TensorFlow: the default strategy's replica context is in force.

    Example:
        >>> with strategy.scope():
        ...     in_cross_replica_context()
        True
    """
    frame = current_frame()
    return frame is not None and frame.replica is None


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes ``strategy`` the one in force wherever no scope is entered, until changed; ``None`` clears it.

    Args:
        strategy: a strategy, or ``None``.

    Raises:
        RuntimeError: called in replica context.
        TypeError: ``strategy`` is none.

    Source: ``tf.distribute.experimental_set_strategy``.

    Example:
        >>> experimental_set_strategy(MirroredStrategy())
    """
    global _global
    if current_replica() is not None:
        raise RuntimeError(
            "experimental_set_strategy was called in replica context (inside strategy.run), where the strategy is "
            "fixed. Must not be called inside a replica context; call it before run."
        )
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(
            f"experimental_set_strategy takes a strategy, or None to clear it, got {strategy!r}; write e.g. "
            "experimental_set_strategy(MirroredStrategy())."
        )
    if _global is not None:
        _global.parameter_store.ensure_equal()
        if _global.watches_modules:
            registrations.uninstall()
    _global = strategy
    set_global_strategy(strategy)
    if strategy is not None and strategy.watches_modules:
        registrations.install()
