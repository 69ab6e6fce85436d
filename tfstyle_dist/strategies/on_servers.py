"""What ``ParameterServerStrategy`` does otherwise than the strategies whose variables are here, and its options."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.parameter_server.protocol.work import WireOptions
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


# ---- options, checked ----------------------------------------------------------------------------------------------


def checked_staleness(max_staleness: Any) -> int | None:
    """The bound, or ``None``.

    Raises:
        ValueError: it is no whole number from 0 on.
    """
    if max_staleness is None:
        return None
    if isinstance(max_staleness, bool) or not isinstance(max_staleness, int) or max_staleness < 0:
        raise ValueError(
            f"max_staleness={max_staleness!r}: write a whole number of updates from 0 on, or None for no bound."
        )
    return max_staleness


def wire_options(dtype: Any, ahead: bool) -> WireOptions:
    """How tensors travel.

    Raises:
        ValueError: a dtype that they cannot travel with.
    """
    if dtype not in (None, torch.bfloat16):
        raise ValueError(f"wire_dtype={dtype!r}: write torch.bfloat16, or None for the parameters' own dtype.")
    return WireOptions(dtype, bool(ahead))


def snapshot_options(folder: Any, seconds: float, every_write: bool) -> dict[str, Any] | None:
    """What servers are told about snapshots; ``None``: to make none.

    Raises:
        ValueError: ``seconds`` is not above 0, or ``every_write`` without a folder.
    """
    if not seconds > 0:
        raise ValueError(f"snapshot_seconds={seconds!r}: write a number of seconds above 0, e.g. 60.")
    if folder is None:
        if every_write:
            raise ValueError("snapshot_every_write=True needs a snapshot_folder to write to.")
        return None
    return {"folder": os.path.abspath(os.fspath(folder)), "seconds": float(seconds), "every_write": bool(every_write)}
