"""Parameters that travel with 16 bits, and parameters that are asked for ahead."""

from __future__ import annotations

import sys
import time
from typing import Any

import cloudpickle
import pytest
import torch

import tfstyle_dist as td

pytestmark = pytest.mark.timeout(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
FAR = {"TFSTYLE_SHARED_MEMORY": "0"}
THIRD = 1 / 3


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(net(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_parameters_travel_with_16_bits_and_stay_float32(cluster: Any) -> None:
    c = cluster(workers=2, ps=2, env=FAR, wire_dtype=torch.bfloat16)
    with c.strategy.scope():
        net = torch.nn.Linear(4, 1)
        count, exact = td.Variable(0.0), td.Variable(torch.full((3,), THIRD))
    with torch.no_grad():
        net.weight.fill_(THIRD)
        net.bias.fill_(0.0)
    table = c.strategy.embedding(8, 2, initializer=("constant", THIRD, 0.0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    rows = torch.optim.SGD(table.parameters(), lr=1.0)

    def look() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return net.weight.detach().clone(), exact.value(), table(torch.tensor([5, 2])).detach()

    weight, whole, picked = c.coordinator.schedule(look).fetch()
    narrow = torch.tensor(THIRD).to(torch.bfloat16).float()
    assert torch.tensor(weight).eq(narrow).all()
    assert torch.tensor(picked).eq(narrow).all()
    assert torch.tensor(whole).eq(THIRD).all()  # a variable is as it is

    def tiny() -> None:
        rows.zero_grad()
        (table(torch.tensor([1, 1])) * 2**-12).sum().backward()  # each is lost beside 1/3 in 16 bits
        rows.step()

    for _ in range(8):
        c.coordinator.schedule(tiny)
    c.coordinator.join(timeout=30)
    expected = torch.tensor(THIRD) - 8 * 2 * 2**-12
    torch.testing.assert_close(table(torch.tensor([1])).detach()[0], expected.expand(2), rtol=1e-6, atol=1e-6)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        count.assign_add(1.0)
        return train(net, optimizer, x, y)

    losses = [c.coordinator.schedule(step, args=batch(n)) for n in range(120)]
    c.coordinator.join(timeout=30)
    assert losses[-1].fetch() < 1e-2 < losses[0].fetch()
    assert float(count.value()) == 120
    torch.testing.assert_close(net.weight.detach(), torch.ones(1, 4), rtol=0, atol=0.02)


def test_only_gradients_and_pulls_may_be_narrow(cluster: Any) -> None:
    with pytest.raises(ValueError, match=r"wire_dtype=torch.float16.*torch.bfloat16"):
        cluster(workers=1, ps=1, wire_dtype=torch.float16)


@pytest.mark.parametrize("workers", [1, 2])
def test_ahead_and_without_staleness_it_is_plain_sgd(cluster: Any, workers: int) -> None:
    c = cluster(workers=workers, ps=2, env=FAR, max_staleness=0, pull_ahead=True)
    with c.strategy.scope():
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
    plain = torch.nn.Linear(4, 1)
    plain.load_state_dict({k: v.detach().clone() for k, v in net.state_dict().items()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        train(net, optimizer, x, y)

    for number in range(30):
        c.coordinator.schedule(step, args=batch(number))
        train(plain, plain_optimizer, *batch(number))
    c.coordinator.join(timeout=30)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bound", [None, 1, 3])
def test_asked_ahead_a_function_is_one_step_older_and_within_the_bound(cluster: Any, bound: int | None) -> None:
    """Each function adds one to the weight and tells by how much the weight it had seen was behind when it ended."""
    c = cluster(workers=2, ps=1, env=FAR, max_staleness=bound, pull_ahead=True)
    with c.strategy.scope():
        net = torch.nn.Linear(1, 1, bias=False)
        ended = td.Variable(0.0)
    with torch.no_grad():
        net.weight.fill_(0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)

    def step() -> tuple[float, float]:
        seen = float(net.weight.detach())
        optimizer.zero_grad()
        (-net.weight).sum().backward()
        optimizer.step()
        time.sleep(0.01)
        now = float(ended.value())
        ended.assign_add(1.0)
        return seen, now - seen

    c.await_workers()
    results = [c.coordinator.schedule(step) for _ in range(40)]
    c.coordinator.join(timeout=30)
    found = [r.fetch() for r in results]
    assert float(net.weight.detach()) == float(ended.value()) == 40
    behind = [late for _, late in found]
    if bound is not None:
        assert max(behind) <= bound
    else:
        assert max(behind) >= 2  # its own last step was not in it either
