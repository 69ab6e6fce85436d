"""Replicas of one process that train different weights are told of; those that do not, are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.core import logging as said

SAID = "The replicas train different weights from now on"


@pytest.fixture
def strategy(caplog: pytest.LogCaptureFixture) -> Iterator[td.MirroredStrategy]:
    said._said.clear()
    caplog.set_level(logging.WARNING, "tfstyle_dist")
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        yield made


class Scaled(nn.Module):
    """Its first call sets the scale, as data-dependent initialisation does: by the batch, or by random numbers."""

    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale, self.ready, self._how = nn.Parameter(torch.ones(3)), False, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.scale.data.copy_(self._how(x))
            self.ready = True
        return x * self.scale


def _train(strategy: td.MirroredStrategy, model: nn.Module, runs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()

    for _ in range(runs):
        strategy.run(step)


@pytest.mark.parametrize("how", [lambda x: 1 / x.std(0), lambda x: torch.randn(3)], ids=["batch", "random"])
def test_a_first_call_that_sets_a_parameter_is_said_once(
    strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture, how: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 3), Scaled(how))
    _train(strategy, model, 4)
    assert caplog.text.count("After run 1 replica 1 has other values of the parameter 'scale' of Scaled") == 1
    assert caplog.text.count(SAID) == 1


def test_called_once_before_it_says_nothing(strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 3), Scaled(lambda x: 1 / x.std(0)))
    model(torch.randn(8, 3))
    _train(strategy, model, 4)
    assert SAID not in caplog.text


def test_a_parameter_that_drifts_later_is_found(
    strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    with strategy.scope():
        weight = nn.Linear(2, 2)

    def step(noise: float) -> None:
        weight.weight.data.add_(noise * torch.randn(2, 2))

    for _ in range(4):
        strategy.run(step, args=(0.0,))
    assert SAID not in caplog.text
    for _ in range(4):
        strategy.run(step, args=(0.1,))
    assert "After run 8 replica 1 has other values of the parameter 'weight' of Linear" in caplog.text


def test_dropout_batch_norm_and_values_that_are_not_finite_are_no_drift(
    strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        model.lost = nn.Parameter(torch.full((2,), float("nan")))
    _train(strategy, model, 8)
    assert SAID not in caplog.text


def test_updates_of_their_own_were_asked_for(strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture) -> None:
    with strategy.scope():
        weight = nn.Linear(2, 2)
        optimizer = td.train.GradientDescentOptimizer(0.1)

    def step() -> None:
        replica = td.get_replica_context().replica_id_in_sync_group
        gradients = [torch.full_like(p, float(replica)) for p in weight.parameters()]
        optimizer.apply_gradients(zip(gradients, weight.parameters(), strict=True), skip_gradients_aggregation=True)

    for _ in range(2):
        strategy.run(step)
    assert SAID not in caplog.text
