"""``compute_average_loss`` with ``torch.optim``: the gradients would be divided twice, and a warning says it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tfstyle_dist as td


@pytest.fixture
def two() -> Iterator[Any]:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


ALONE = -0.4  # what one device does to a weight of 0 in a step with a rate of 0.1


def average(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return td.nn.compute_average_loss(x * w, global_batch_size=2)


def steps(strategy: Any, loss_of: Callable[[Any, Any], torch.Tensor], scale: str = "MEAN") -> float:
    """One weight after a step with the examples 4 and 4."""
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    strategy.set_gradient_policy(scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss_of(torch.full((2 // strategy.num_replicas_in_sync,), 4.0), model.weight.reshape(())).backward()
        optimizer.step()

    strategy.run(step)
    return round(float(model.weight.detach()), 6)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "compute_average_loss divides by the global batch" in message]


@pytest.mark.parametrize("more", [lambda loss, w: loss, lambda loss, w: loss + 0 * w**2])
def test_it_is_said(two: Any, caplog: pytest.LogCaptureFixture, more: Callable[[Any, Any], Any]) -> None:
    with caplog.at_level(logging.WARNING):
        assert steps(two, lambda x, w: more(average(x, w), w)) == ALONE / 2
    (said,) = told(caplog)
    assert "1/2 of those of one device" in said
    assert 'set_gradient_policy(scale="SUM")' in said


@pytest.mark.distributed(workers=2)
def test_it_is_said_on_ranks(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy, caplog.at_level(logging.WARNING):
        assert steps(strategy, average) == ALONE / 2
    assert len(told(caplog)) == (rank == 0)


def test_right_programs_are_told_nothing(two: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert steps(two, lambda x, w: 2 * average(x, w)) == ALONE
        assert steps(td.OneDeviceStrategy("cpu:0"), average) == ALONE
        assert steps(two, lambda x, w: (x * w).mean() + 0 * average(x, w).detach()) == ALONE
        assert steps(two, average, "SUM") == ALONE
        assert steps(two, lambda x, w: td.nn.compute_average_loss(x * w, global_batch_size=1)) == ALONE  # of its share
    assert not told(caplog)


class Named(torch.autograd.Function):
    """Keeps what it likes in its context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.name = "a name"
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


def test_losses_of_any_shape(two: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Terms that are shared, as in a recurrence, are looked at once; nodes of the program have names of their own."""

    def recurrence(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        one, two = 0 * average(x, w), (x * w).mean()
        for _ in range(60):
            one, two = two, one + two
        return Named.apply(two) / 2504730781961.0  # the 61st number of Fibonacci

    with caplog.at_level(logging.WARNING):
        assert steps(two, recurrence) == ALONE


def test_optimizers_that_sum_are_told_nothing(two: Any, caplog: pytest.LogCaptureFixture) -> None:
    with two.scope():
        w = td.Variable(0.0)
    optimizer = td.train.GradientDescentOptimizer(0.1)
    with caplog.at_level(logging.WARNING):
        two.run(lambda: optimizer.minimize(average(torch.full((1,), 4.0), w), var_list=[w]))
    assert round(float(w), 6) == ALONE
    assert not told(caplog)


def test_a_policy_for_parameters_that_are_not_there_yet(two: Any) -> None:
    with pytest.raises(ValueError, match=r"owns no parameter yet.*after the model was built in strategy.scope"):
        two.set_gradient_policy(scale="SUM")
