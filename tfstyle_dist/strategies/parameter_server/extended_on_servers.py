"""What ``ParameterServerStrategy`` does otherwise than the strategies whose variables are on this process's devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.strategies.extended import StrategyExtended
from tfstyle_dist.variables.known_tensors import find_record

Method = TypeVar("Method", bound=Callable[..., Any])


class ExtendedOnServers(StrategyExtended):
    """``strategy.extended`` of a ``ParameterServerStrategy``."""

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Variables and parameters made in the block live on the server that holds ``colocate_with_variable``.

        They are not cut into shards, and the turn of the servers stays where it was.

        Args:
            colocate_with_variable: a variable, shard or parameter of this strategy; of one with several shards the
                first one's server counts.

        Raises:
            ValueError: the variable was not created in this strategy's scope.
        """
        with super().colocate_vars_with(colocate_with_variable):
            store: Any = self.strategy.parameter_store
            record = cast(RemoteRecord, find_record(colocate_with_variable))
            before, store.beside = store.beside, record.shards[0].server
            try:
                yield
            finally:
                store.beside = before


def warned_on_the_chief(method: Method) -> Method:
    """The method of ``Strategy``, which says once when it is called outside of scheduled functions.

    Args:
        method: ``run`` or ``reduce``.
    """

    @wraps(method)
    def call(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        if strategy.cluster_resolver is not None:
            warn_once(
                "a method of ParameterServerStrategy outside of functions",
                f"ParameterServerStrategy.{method.__name__} was called outside of ClusterCoordinator.schedule: it "
                "works in the coordinator's program, while the workers have nothing to do. Call it in a function that "
                "ClusterCoordinator.schedule gets.",
            )
        return method(strategy, *args, **kwargs)

    return cast(Method, call)
