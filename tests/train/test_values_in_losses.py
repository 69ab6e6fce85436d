"""A loss made of ``v.value()`` does not train ``v``: it is said, and only where a gradient is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tfstyle_dist as td

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_said_yet")]
SAID = "got no gradient in a step that took its value"
STRATEGIES: dict[str, Callable[[], Any]] = {
    "default": td.get_strategy,
    "one": lambda: td.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: td.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = STRATEGIES[request.param]()
    yield made
    if request.param != "default":
        made.close()


def variables(strategy: Any) -> list[Any]:
    with strategy.scope():
        return [td.Variable(torch.ones(2), name=name) for name in ("kept", "other")]


def by_torch(strategy: Any, loss: Callable[[Any, Any], torch.Tensor]) -> None:
    kept, other = variables(strategy)
    optimizer = torch.optim.SGD([kept, other], lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss(kept, other).backward()
        optimizer.step()

    for _ in range(2):
        strategy.run(step)


def by_names_of_tensorflow(strategy: Any, loss: Callable[[Any, Any], torch.Tensor]) -> None:
    kept, other = variables(strategy)
    optimizer = td.train.GradientDescentOptimizer(0.1)
    for _ in range(2):
        strategy.run(lambda: optimizer.minimize(loss(kept, other), var_list=[kept, other]))


WATCHED = [("mirrored", by_torch), ("central", by_torch), *((name, by_names_of_tensorflow) for name in STRATEGIES)]
"""Optimizers of torch are where there are several replicas."""


@pytest.mark.parametrize(("strategy", "train"), WATCHED, indirect=["strategy"])
@pytest.mark.parametrize("read", ["value", "read_value"])
def test_a_variable_that_is_not_trained_for_it_is_said_once(
    strategy: Any, train: Any, read: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(strategy, lambda kept, other: (getattr(kept, read)() * other).sum())
    assert caplog.text.count(SAID) == 1
    assert "The variable kept got no gradient" in caplog.text


def looked_at(kept: Any, other: Any) -> torch.Tensor:
    assert float(kept.value().sum()) > 0
    return (kept * other).sum()


def unused(kept: Any, other: Any) -> torch.Tensor:
    with torch.no_grad():
        scale = kept.value()
    return (scale * other).sum()


@pytest.mark.parametrize("train", [by_torch, by_names_of_tensorflow])
@pytest.mark.parametrize("loss", [looked_at, unused])
def test_nothing_is_said_of_values_that_are_looked_at(
    strategy: Any, train: Any, loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train(strategy, loss)
    assert SAID not in caplog.text
