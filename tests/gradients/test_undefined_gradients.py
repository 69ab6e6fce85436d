"""A gradient that autograd leaves undefined, or that was accumulated and dropped, is none, as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from this_replica import replica
from torch import nn
from two_replicas import assert_all_close, flat_gradients, flat_weights, gradients, on_all, plain, weights

import tfstyle_dist as td

_RANKS = {"workers": 2, "timeout": 50, "deadline": 15}


@pytest.fixture(
    params=[
        "in_process",
        pytest.param("ranks", marks=pytest.mark.distributed(**_RANKS)),
        pytest.param("streamed", marks=pytest.mark.distributed(**_RANKS, env={"TFSTYLE_SHARED_MEMORY": "0"})),
        pytest.param("central", marks=[pytest.mark.distributed(**_RANKS), pytest.mark.cpu_only("shares memory")]),
    ]
)
def strategy(request: pytest.FixtureRequest) -> Iterator[td.Strategy]:
    """Two replicas, in this process or as ranks that exchange their gradients in different ways."""
    torch.set_num_threads(1)
    kind = td.experimental.CentralStorageStrategy if request.param == "central" else td.MirroredStrategy
    with kind(["cpu:0", "cpu:1"]) if request.param == "in_process" else kind() as made:
        yield made


class _Product(torch.autograd.Function):
    """Gives the second factor a gradient only if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, gives: bool) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.gives = gives
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, w = ctx.saved_tensors
        return grads[0] @ w.T, x.T @ grads[0] if ctx.gives else None, None


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.w = nn.Linear(3, 3), nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor, gives: bool) -> torch.Tensor:
        return _Product.apply(self.first(x), self.w, gives).sum()


def _input() -> torch.Tensor:
    return torch.full((4, 3), float(replica() + 1), dtype=torch.float64)


def _made(strategy: td.Strategy) -> tuple[nn.Module, torch.optim.Optimizer]:
    with strategy.scope():
        model = plain(_Net)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize("passes", [1, 2])
def test_an_undefined_gradient_is_none(strategy: td.Strategy, passes: int) -> None:
    """A gradient of zeros would let the weight decay."""
    model, optimizer = _made(strategy)

    def step() -> None:
        with strategy.accumulate():
            for _ in range(passes - 1):
                model(_input(), False).backward()
        model(_input(), False).backward()
        optimizer.step()

    strategy.run(step)
    assert on_all(strategy, lambda: torch.tensor(float(model.w.grad is None))).tolist() == [1.0, 1.0]
    assert on_all(strategy, lambda: model.w).eq(1.0).all()
    assert not on_all(strategy, lambda: model.first.weight).eq(1.0).all()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_an_undefined_gradient_is_none_where_graphs_are_kept(strategy: td.Strategy) -> None:
    model, _ = _made(strategy)
    strategy.run(lambda: model(_input(), False).backward(create_graph=True))
    assert on_all(strategy, lambda: torch.tensor(float(model.w.grad is None))).tolist() == [1.0, 1.0]
    model.zero_grad()


def test_a_gradient_that_one_replica_left_undefined_counts_as_zero(strategy: td.Strategy) -> None:
    model, _ = _made(strategy)
    strategy.run(lambda: model(_input(), replica() == 0).backward())
    reference = plain(_Net)
    for number in range(2):
        (reference(torch.full((4, 3), number + 1.0, dtype=torch.float64), number == 0) / 2).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


def test_what_was_accumulated_and_dropped_is_none(strategy: td.Strategy) -> None:
    model, optimizer = _made(strategy)

    def step() -> None:
        with strategy.accumulate():
            model(_input(), True).backward()
        optimizer.zero_grad()
        model.first(_input()).sum().backward()
        optimizer.step()

    strategy.run(step)
    reference = plain(_Net)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.5)
    for number in range(2):
        (reference.first(torch.full((4, 3), number + 1.0, dtype=torch.float64)).sum() / 2).backward()
    expected.step()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))
    assert_all_close(weights(strategy, model), flat_weights(reference))


def test_a_sum_after_what_was_accumulated_and_dropped(strategy: td.Strategy) -> None:
    """A replica that only receives the others' sum forgets what it had before, too."""
    model, optimizer = _made(strategy)
    strategy.set_gradient_policy(scale="SUM")

    def step() -> None:
        model(_input(), True).backward()
        with strategy.accumulate():
            model(_input(), True).backward()
        optimizer.zero_grad()
        if replica() == 0:
            model.first(_input()).sum().backward()
        else:
            model(_input(), True).backward()

    strategy.run(step)
    reference = plain(_Net)
    reference.first(torch.full((4, 3), 1.0, dtype=torch.float64)).sum().backward()
    reference(torch.full((4, 3), 2.0, dtype=torch.float64), True).backward()
    assert_all_close(gradients(strategy, model), flat_gradients(reference))


def test_a_sum_that_one_replica_alone_dropped_stays_with_the_other(strategy: td.Strategy) -> None:
    model, optimizer = _made(strategy)
    strategy.set_gradient_policy(scale="SUM")

    def step() -> None:
        model(_input(), True).backward()
        with strategy.accumulate():
            model(_input(), True).backward()
        if replica() == 0:
            optimizer.zero_grad()
        (model.first(_input()).sum() if replica() == 0 else model(_input(), True)).backward()

    strategy.run(step)
    x = [torch.full((4, 3), number + 1.0, dtype=torch.float64) for number in range(2)]
    old, new = plain(_Net), plain(_Net)
    for number in range(2):
        old(x[number], True).backward()
    new.first(x[0]).sum().backward()
    for _ in range(2):
        new(x[1], True).backward()
    after = on_all(strategy, lambda: flat_gradients(model))
    torch.testing.assert_close(after[0], flat_gradients(new))
    torch.testing.assert_close(after[1], flat_gradients(new) + flat_gradients(old))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("policy", ["accumulate", "apply"])
def test_replicas_stay_in_step_where_graphs_are_kept_and_nothing_is_reduced(strategy: td.Strategy, policy: str) -> None:
    model, _ = _made(strategy)
    if policy == "apply":
        strategy.set_gradient_policy(reduce_at="apply")

    def step() -> None:
        with strategy.accumulate() if policy == "accumulate" else nullcontext():
            model(_input(), replica() == 1).backward(create_graph=True)

    strategy.run(step)
    assert on_all(strategy, lambda: torch.tensor(float(model.w.grad is None))).tolist() == [1.0, 0.0]
    model.zero_grad()
