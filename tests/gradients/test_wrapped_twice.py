"""``DistributedDataParallel`` that was left around a model of a strategy, which sums its gradients itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tfstyle_dist as td
from tfstyle_dist.core.logging import _said

two_ranks = pytest.mark.distributed(workers=2, timeout=50, deadline=15)


@pytest.fixture(autouse=True)
def _not_said_yet() -> None:
    _said.discard("DistributedDataParallel around a model of a strategy")


def _trained(strategy: td.Strategy, rank: int, wrap: bool) -> torch.Tensor:
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Linear(3, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called: Any = DistributedDataParallel(model) if wrap else model
    for number in range(4):
        called(torch.full((2, 3), 1.0 + rank + number, dtype=torch.float64)).square().mean().backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@two_ranks
def test_gradients_as_views_of_its_buckets_are_refused(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            model = nn.Linear(3, 2)
        with pytest.raises(ValueError, match=r"a Linear of MultiWorkerMirroredStrategy.*Leave DistributedDataParallel"):
            DistributedDataParallel(model, gradient_as_bucket_view=True)
        outside = nn.Linear(3, 2)
        assert DistributedDataParallel(outside, gradient_as_bucket_view=True).module is outside


@two_ranks
def test_a_wrapper_that_was_left_is_said_and_changes_nothing(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy, caplog.at_level(logging.WARNING):
        bare = _trained(strategy, rank, wrap=False)
        assert not caplog.messages
        torch.testing.assert_close(_trained(strategy, rank, wrap=True), bare)
        _trained(strategy, rank, wrap=True)
    (said,) = caplog.messages
    assert "a Linear of MultiWorkerMirroredStrategy" in said
    assert "strategy.accumulate() for model.no_sync()" in said


@two_ranks
def test_a_model_that_is_wrapped_while_it_is_built_is_the_strategys(rank: int) -> None:
    outside = nn.Linear(3, 2)
    refused = pytest.raises(ValueError, match="gradient_as_bucket_view=True")
    with td.MultiWorkerMirroredStrategy() as strategy, strategy.scope(), refused:
        DistributedDataParallel(outside, gradient_as_bucket_view=True)


@two_ranks
def test_what_no_strategy_sums_is_left_to_it(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy, caplog.at_level(logging.WARNING):
        with td.OneDeviceStrategy("cpu:0") as alone, alone.scope():
            assert DistributedDataParallel(nn.Linear(3, 2), gradient_as_bucket_view=True).module.weight is not None
        ended = td.MultiWorkerMirroredStrategy()
        with ended.scope():
            model = nn.Linear(3, 2)
        ended.close()
        assert DistributedDataParallel(model, gradient_as_bucket_view=True).module is model
        assert strategy.num_replicas_in_sync == 2
    assert not caplog.messages


@two_ranks
@pytest.mark.parametrize("what", ["the model", "the wrapper"])
def test_a_model_in_a_wrapper_is_not_adopted(rank: int, what: str, caplog: pytest.LogCaptureFixture) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy, caplog.at_level(logging.WARNING):
        model, other = nn.Linear(3, 2), nn.Linear(3, 2)
        views, plain = DistributedDataParallel(model, gradient_as_bucket_view=True), DistributedDataParallel(other)
        with pytest.raises(ValueError, match=r"a Linear of MultiWorkerMirroredStrategy.*Leave DistributedDataParallel"):
            strategy.experimental_adopt(model if what == "the model" else views)
        assert not caplog.messages
        strategy.experimental_adopt(other if what == "the model" else plain)
    (said,) = caplog.messages
    assert "averaged twice" in said
