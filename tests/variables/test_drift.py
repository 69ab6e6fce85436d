"""Replicas of one process that train different weights are told of; those that do not, are not."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.core import logging as said
from tfstyle_dist.variables import drift

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


class Annealing:
    """A schedule whose number replicas share."""

    steps = 0

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        type(self).steps += 1
        optimizer.param_groups[0]["lr"] = 0.1 * self.steps


def test_the_rate_that_differs_is_named(strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture) -> None:
    """A schedule that replicas share has advanced when the second one asks it."""
    with strategy.scope():
        model = nn.Linear(3, 1)
    optimizer, anneal = torch.optim.SGD(model.parameters(), lr=0.1), Annealing()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        anneal(optimizer)
        optimizer.step()

    strategy.run(step)
    said = r"SGD.param_groups\[0\]\['lr'\] is 0\.[12] there, and 0\.[12] on the latter: what sets it, such as a sched"
    assert re.search(said, caplog.text)
    assert SAID in caplog.text


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


def _make_differ(weight: torch.Tensor) -> None:
    number = td.get_replica_context().replica_id_in_sync_group
    weight.data.copy_(torch.full(weight.shape, 1.0 + number))


def test_where_memory_has_run_out_the_step_has_succeeded_and_nothing_is_looked_at_any_more(
    strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strategy.scope():
        linear = nn.Linear(2, 2)
    looks = []

    def no_memory(*tensors: torch.Tensor) -> bool:
        looks.append(tensors)
        raise torch.OutOfMemoryError("no memory left")

    def step() -> float:
        _make_differ(linear.weight)
        return float(linear.weight.detach()[0, 0])

    caplog.set_level(logging.DEBUG, "tfstyle_dist")
    monkeypatch.setattr(drift, "differ", no_memory)
    contents = strategy.parameter_store.contents
    assert contents is not None
    monkeypatch.setattr(contents, "distrust", lambda: pytest.fail("the step has succeeded"))
    for _ in range(4):
        assert strategy.experimental_local_results(strategy.run(step)) == (1.0, 2.0)
    assert len(looks) == 1
    assert "no memory left" in caplog.text


def test_numbers_of_eight_bits_are_compared(strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture) -> None:
    with strategy.scope():
        module = nn.Module()
        module.small = nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn))
        module.last = nn.Parameter(torch.zeros(3))

    def step() -> None:
        _make_differ(module.small)
        _make_differ(module.last)

    strategy.run(step)
    assert "other values of the parameter 'small' of Module" in caplog.text
    assert "other values of the parameter 'last' of Module" in caplog.text


def test_large_parameters_are_compared_in_slices(
    strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strategy.scope():
        linear = nn.Linear(5, 7)
    monkeypatch.setattr(drift, "AT_A_TIME", 4)
    equal, sizes = torch.equal, []

    def counted(one: torch.Tensor, other: torch.Tensor) -> bool:
        if one.dtype is torch.float32:  # not the state of a generator
            sizes.append(one.numel())
        return equal(one, other)

    def step(value: float) -> None:
        if td.get_replica_context().replica_id_in_sync_group == 1:
            linear.weight.data[6, 4] += value

    monkeypatch.setattr(torch, "equal", counted)
    strategy.run(step, args=(0.0,))
    assert sum(sizes) == 5 * 7 + 7
    assert max(sizes) <= 4
    assert SAID not in caplog.text
    strategy.run(step, args=(1.0,))
    assert "the parameter 'weight' of Linear" in caplog.text


@pytest.mark.distributed(workers=2, timeout=60)
def test_replicas_have_their_numbers_in_the_job(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    said._said.clear()
    caplog.set_level(logging.WARNING, "tfstyle_dist")
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            linear = nn.Linear(2, 2)
        strategy.run(lambda: _make_differ(linear.weight))
    assert f"After run 1 replica {2 * rank + 1} has other values of the parameter 'weight' of Linear" in caplog.text
    assert f"than replica {2 * rank}: the step function" in caplog.text


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_a_variable_that_was_written_past_its_aggregation_is_named(
    strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture, aggregation: str
) -> None:
    with strategy.scope():
        v = td.Variable([1.0, 2.0], False, name="total", aggregation=td.VariableAggregation[aggregation])

    def step() -> None:
        v[0] = 5.0 + td.get_replica_context().replica_id_in_sync_group

    for _ in range(3):
        strategy.run(step)
    (record,) = caplog.records
    assert "After run 1 replica 1 has another value of the variable 'total' than replica 0" in record.getMessage()
    assert f"its aggregation is {aggregation}" in record.getMessage()


def test_variables_that_may_differ_or_do_not_are_not_named(
    strategy: td.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    with strategy.scope():
        same = td.Variable(1.0, aggregation=td.VariableAggregation.SUM)
        own = td.Variable(1.0, False)
        read = td.Variable(
            1.0, synchronization=td.VariableSynchronization.ON_READ, aggregation=td.VariableAggregation.SUM
        )
    optimizer = torch.optim.SGD([same], lr=0.1)

    def step() -> None:
        number = 1.0 + td.get_replica_context().replica_id_in_sync_group
        optimizer.zero_grad()
        (same * number).backward()
        optimizer.step()
        own.mul_(number)
        read.mul_(number)

    for _ in range(4):
        strategy.run(step)
    assert not caplog.records
