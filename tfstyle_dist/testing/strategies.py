"""One test body on several strategies, each in the processes that it needs.

The counterpart of ``tf.__internal__.distribute.combinations``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

from tfstyle_dist.testing.options import MARKER

if TYPE_CHECKING:
    from tfstyle_dist.strategies import Strategy

__all__ = ["STRATEGIES", "NamedStrategy", "mirrored", "strategy_combinations"]


@dataclass(frozen=True)
class NamedStrategy:
    """A strategy that tests ask for by name.

    Attributes:
        name: The id of the test's parameter.
        create: Makes the strategy, once for each test and process.
        workers: How many rank processes it needs; None for one that lives in the pytest process itself.
    """

    name: str
    create: Callable[[], Strategy]
    workers: int | None = None


def mirrored(replicas: int = 1) -> Strategy:
    """A ``MirroredStrategy`` over all ranks of the test with some replicas on the CPU in each.

    Args:
        replicas: Local replicas.
    """
    from tfstyle_dist.strategies import MirroredStrategy

    return MirroredStrategy([f"cpu:{number}" for number in range(replicas)])


def _default() -> Strategy:
    from tfstyle_dist.strategies import get_strategy

    return get_strategy()


def _one_device() -> Strategy:
    from tfstyle_dist.strategies import OneDeviceStrategy

    return OneDeviceStrategy("cpu")


_ALL = (
    NamedStrategy("default", _default),
    NamedStrategy("one_device", _one_device),
    NamedStrategy("mirrored_1", mirrored),
    NamedStrategy("mirrored_2", lambda: mirrored(2)),
    NamedStrategy("mirrored_3", lambda: mirrored(3)),
    NamedStrategy("mirrored_2_workers", mirrored, workers=2),
    NamedStrategy("mirrored_2_workers_2_replicas", lambda: mirrored(2), workers=2),
)

STRATEGIES: Mapping[str, NamedStrategy] = MappingProxyType({named.name: named for named in _ALL})
"""All strategies by name."""


def strategy_combinations(*strategies: str | NamedStrategy, **marker: Any) -> pytest.MarkDecorator:
    """Runs a test once for each strategy, which it gets as its argument ``strategy``.

    Args:
        strategies: Names out of ``STRATEGIES``, or strategies of your own; default: all of ``STRATEGIES``.
        marker: Further arguments of the marker ``distributed`` for those that need several workers.

    Returns:
        The decorator.

    Raises:
        ValueError: If there is no strategy of a name.

    Example:
        >>> @strategy_combinations("one_device", "mirrored_2", "mirrored_2_workers", timeout=90)
        ... def test_reduce(strategy):
        ...     assert strategy.reduce("SUM", strategy.run(lambda: 1.0)) == strategy.num_replicas_in_sync
    """
    chosen = [_named(strategy) for strategy in strategies or STRATEGIES]
    params = [
        pytest.param(
            named,
            id=named.name,
            marks=() if named.workers is None else getattr(pytest.mark, MARKER)(workers=named.workers, **marker),
        )
        for named in chosen
    ]
    return pytest.mark.parametrize("strategy", params, indirect=True)


def _named(strategy: str | NamedStrategy) -> NamedStrategy:
    if isinstance(strategy, NamedStrategy):
        return strategy
    if strategy not in STRATEGIES:
        raise ValueError(
            f"there is no strategy named {strategy!r}; write one of {', '.join(STRATEGIES)}, or a NamedStrategy of "
            "your own"
        )
    return STRATEGIES[strategy]
