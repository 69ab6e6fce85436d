"""Workers whose weights have come to differ are told so, whatever made them; within a step they may differ."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.core import logging as said
from tfstyle_dist.gradients import drift_between_workers

pytestmark = [pytest.mark.distributed(workers=2, timeout=60), pytest.mark.timeout(60)]

SAID = "other values than worker 0"


def in_ways(*ways: str) -> pytest.MarkDecorator:
    """Runs a test with workers that exchange gradients in these ways."""
    return pytest.mark.parametrize("strategy", ways, indirect=True)


@pytest.fixture
def strategy(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[td.Strategy]:
    """Two workers."""
    caplog.set_level(logging.WARNING, "tfstyle_dist")
    way = getattr(request, "param", "memory")
    said._said.clear()
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", "0" if way == "sockets" else "1")
    with td.MirroredStrategy(["cpu:0", "cpu:1"] if way == "two replicas each" else None) as made:
        yield made


class Trained:
    """A model and how it is trained."""

    def __init__(self, strategy: td.Strategy, rank: int, lr: float = 0.1) -> None:
        torch.manual_seed(0)
        self.strategy, self.rank = strategy, rank
        with strategy.scope():
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def backward(self) -> None:
        """Makes new gradients."""
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 3)).square().mean().backward()

    def __call__(self, steps: int = 1, skips: int | None = None) -> None:
        """Makes some steps; worker ``skips`` does not update its weights."""

        def step() -> None:
            self.backward()
            if self.rank != skips:
                self.optimizer.step()

        for _ in range(steps):
            self.strategy.run(step)


def check_said(caplog: pytest.LogCaptureFixture, rank: int, *parts: str) -> None:
    """Worker 0 has said it, once."""
    assert caplog.text.count(SAID) == (1 if rank == 0 else 0)
    assert rank or all(part in caplog.text for part in parts)


@in_ways("memory", "sockets", "two replicas each")
def test_weights_that_one_worker_loads_are_seen_in_the_first_step(
    strategy: td.Strategy, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    train = Trained(strategy, rank)
    if rank == 1:
        train.model[0].load_state_dict(nn.Linear(3, 4).state_dict())
    train(20)
    check_said(caplog, rank, "Before backward pass 1 worker(s) 1 had", "0.weight", "0.bias", "with strategy.scope():")
    assert rank or "2.weight" not in caplog.text


def test_steps_that_one_worker_leaves_out_are_seen(
    strategy: td.Strategy, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    train = Trained(strategy, rank)
    train(5)
    assert SAID not in caplog.text
    train(1, skips=1)
    train(7)
    check_said(caplog, rank, "Before backward pass 9 worker(s) 1 had", "2.bias", "made another number of optimizer")


def test_other_learning_rates_are_seen(strategy: td.Strategy, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    Trained(strategy, rank, lr=0.1 * (1 + rank))(3)
    check_said(caplog, rank, "Before backward pass 2 worker(s) 1 had", "another learning rate")


def test_what_is_not_a_number_on_one_worker_alone_is_seen(
    strategy: td.Strategy, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    train = Trained(strategy, rank)
    with torch.no_grad():
        train.model[2].bias.fill_(float("nan"))
        train.model[0].bias[0] = float("nan") if rank == 1 else 1.0
    train()
    check_said(caplog, rank, "parameters: 0.bias.")


def test_equal_weights_are_not_spoken_of(strategy: td.Strategy, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    train = Trained(strategy, rank)
    with strategy.scope():
        other = nn.Module()
        other.register_parameter("z", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
        other.rows = nn.Embedding(5, 2, sparse=True)
    mine = torch.optim.SGD(other.parameters(), 0.1)

    def step() -> None:
        mine.zero_grad()
        (other.z.abs().sum() + other.rows(torch.tensor([rank])).sum()).backward()
        mine.step()

    for _ in range(5):
        strategy.run(step)
        train()
    assert SAID not in caplog.text


@in_ways("sockets", "two replicas each")
def test_weights_may_differ_within_a_step_and_in_runs_without_backward(
    strategy: td.Strategy, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    train = Trained(strategy, rank)
    bias = train.model[2].bias

    def perturbed() -> None:
        noise = td.get_replica_context().replica_id_in_sync_group * torch.ones(1)
        with torch.no_grad():
            bias.add_(noise)
        train.backward()
        with torch.no_grad():
            bias.sub_(noise)
        train.optimizer.step()

    for _ in range(4):
        strategy.run(perturbed)
        if rank == 0:  # averages, for an evaluation of the chief's
            kept = bias.detach().clone()
            with torch.no_grad():
                bias.fill_(100.0)
            strategy.run(lambda: train.model(torch.ones(2, 3)))
            with torch.no_grad():
                bias.copy_(kept)
    assert SAID not in caplog.text


def test_what_fails_on_one_worker_is_not_compared(
    strategy: td.Strategy, rank: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG, "tfstyle_dist")

    def fails(record: object) -> None:
        raise MemoryError(f"no memory for {record}")

    if rank == 1:
        monkeypatch.setattr(drift_between_workers, "_numbers_of", fails)
    train = Trained(strategy, rank)
    if rank == 1:
        train.model[0].load_state_dict(nn.Linear(3, 4).state_dict())
    train(3)
    assert SAID not in caplog.text
    assert rank == 0 or "not compared this time: MemoryError" in caplog.text


@in_ways("memory", "sockets")
def test_a_backward_pass_that_raised_counts_on_all_workers(
    strategy: td.Strategy, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    train = Trained(strategy, rank)
    train(1)

    def fails(_: torch.Tensor) -> None:
        raise ArithmeticError("rank 1 alone")

    def step() -> None:
        train.optimizer.zero_grad()
        middle = train.model[0](torch.ones(2, 3))
        if rank == 1:
            middle.register_hook(fails)
        try:
            train.model[2](middle.tanh()).sum().backward()
        except ArithmeticError:
            train.model[2].bias.grad = None

    strategy.run(step)
    train(8)
    assert SAID not in caplog.text


@pytest.mark.parametrize("runs", [5, 100, 101])
def test_runs_without_backward_read_the_weights_once(
    strategy: td.Strategy, rank: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    numbers_of, read = drift_between_workers._numbers_of, []

    def counted(held: torch.Tensor) -> tuple[float, ...]:
        read.append(held.shape)
        return numbers_of(held)

    monkeypatch.setattr(drift_between_workers, "_numbers_of", counted)
    train = Trained(strategy, rank)
    for _ in range(runs - 1):
        strategy.run(lambda: train.model(torch.ones(2, 3)))
    assert len(read) == 4
    with torch.no_grad():
        train.model[2].bias.fill_(float(rank))
    train()
    compared = runs <= 100
    assert len(read) == (5 if compared else 4)
    assert caplog.text.count(SAID) == (1 if compared and rank == 0 else 0)
    train()
    check_said(caplog, rank, f"Before backward pass {1 if compared else 2} worker(s)", "2.bias")


@pytest.mark.parametrize("passes", [3, 5])
def test_runs_of_several_passes_are_compared(
    strategy: td.Strategy, rank: int, caplog: pytest.LogCaptureFixture, passes: int
) -> None:
    train = Trained(strategy, rank)

    def step() -> None:
        for _ in range(passes):
            train.backward()
            train.optimizer.step()

    strategy.run(step)
    with torch.no_grad():
        train.model[2].bias += rank
    for _ in range(10):
        strategy.run(step)
    check_said(caplog, rank, f"Before backward pass {passes + 1} worker(s) 1 had")


def test_passes_outside_of_run_send_nothing_of_an_earlier_run(
    strategy: td.Strategy, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    train = Trained(strategy, rank)

    def evaluate() -> None:
        strategy.run(lambda: train.model(torch.ones(2, 3)))

    for _ in range(4):
        train.backward()
        if rank == 0:
            evaluate()
        train.optimizer.step()
        if rank == 1:
            evaluate()
    assert SAID not in caplog.text
