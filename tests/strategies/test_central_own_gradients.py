"""Central storage in one process: gradients that the step sets by hand count for all replicas, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as td

Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], Any]


@pytest.fixture
def strategy() -> Iterator[td.Strategy]:
    with td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def trained(strategy: td.Strategy, step: Step, runs: int = 1, model: nn.Module | None = None) -> torch.Tensor:
    """The weight after some runs, in which replica 0 has ones and replica 1 threes."""
    with strategy.scope():
        if model is None:
            model = nn.Linear(2, 1, bias=False)
            nn.init.zeros_(model.weight)
        else:
            strategy.experimental_adopt(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(runs):
        strategy.run(lambda: step(model, optimizer, torch.ones(1, 2) * (1 + 2 * replica())))
    return next(model.parameters()).detach()


def replica() -> int:
    return int(td.get_replica_context().replica_id_in_sync_group)


def mean(gradient: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = td.get_replica_context().all_reduce("MEAN", gradient)
    return result


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model.weight.grad = x  # type: ignore[assignment]
    optimizer.step()


def small(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    by_hand(model, optimizer, 1e-9 * x)


def in_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    def closure() -> float:
        model.weight.grad = x  # type: ignore[assignment]
        return 0.0

    optimizer.step(closure)


def on_one_replica(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    if replica() == 1:
        model.weight.grad = x  # type: ignore[assignment]
    optimizer.step()


def combined(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(model(x).sum(), [model.weight])
    by_hand(model, optimizer, gradient * 0.5)  # a tensor of its own, no result of autograd.grad any more


@pytest.mark.parametrize("step", [by_hand, small, in_a_closure, on_one_replica, combined])
def test_gradients_of_each_replicas_own_are_refused(strategy: td.Strategy, step: Step) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)that the step has set itself.*all_reduce\('MEAN', gradients\)"):
        trained(strategy, step)


@pytest.mark.cpu_only("the pretend device has few operations of sparse tensors")
def test_rows_of_each_replicas_own_are_refused(strategy: td.Strategy) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, _: torch.Tensor) -> None:
        rows = torch.tensor([[replica()]])
        by_hand(model, optimizer, torch.sparse_coo_tensor(rows, torch.ones(1, 2), (3, 2)))

    with pytest.raises(RuntimeError, match="that the step has set itself"):
        trained(strategy, step, model=nn.Embedding(3, 2, sparse=True))


def test_a_later_step_after_those_with_backward_is_refused(strategy: td.Strategy) -> None:
    runs = [0]  # shared by the replicas

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        if runs[0] < 2 * 2:
            model(x).sum().backward()
            optimizer.step()
        else:
            by_hand(model, optimizer, x)
        mean(x)  # both have looked
        runs[0] += 1

    with pytest.raises(RuntimeError, match="that the step has set itself"):
        trained(strategy, step, runs=3)


@pytest.mark.parametrize("in_closure", [False, True])
def test_gradients_that_are_made_one_count_for_all(strategy: td.Strategy, in_closure: bool) -> None:
    step = in_a_closure if in_closure else by_hand
    weight = trained(strategy, lambda model, optimizer, x: step(model, optimizer, mean(x)), runs=4)
    assert weight.tolist() == [[-8.0, -8.0]]


def test_gradients_of_earlier_runs_and_those_that_are_clipped_stay_allowed(
    strategy: td.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        if model.weight.grad is None:
            model(x).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    weight = trained(strategy, step, runs=4)
    torch.testing.assert_close(weight, torch.full((1, 2), -4 * 0.5 / 2**0.5))
    assert "count nowhere" not in caplog.text


def test_what_a_replica_adds_after_backward_is_said(strategy: td.Strategy, caplog: pytest.LogCaptureFixture) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        model.weight.grad.add_(x)  # type: ignore[union-attr,operator]
        optimizer.step()

    trained(strategy, step, runs=2)
    assert caplog.text.count("SGD.step() applies gradients that the step has changed after backward()") == 1
