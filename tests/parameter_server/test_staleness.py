"""How old the parameters are that a gradient was computed with."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import cloudpickle
import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.coordinator.closure import Staleness

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("workers", [1, 3])
def test_without_staleness_it_is_plain_sgd(cluster: Any, workers: int) -> None:
    """No join between the steps: the bound alone keeps them apart."""
    c = cluster(workers=workers, ps=2, max_staleness=0)
    with c.strategy.scope():
        net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        train(net, optimizer, x, y)

    plain = model()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for number in range(60):
        c.coordinator.schedule(step, args=batch(number))
        train(plain, plain_optimizer, *batch(number))
    c.coordinator.join(timeout=60)
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-6)


def largest_staleness(c: Any, functions: int) -> int:
    """Each function counts how many others have ended between its read and its own write."""
    with c.strategy.scope():
        ended = td.Variable(0, dtype=torch.int64)

    def step(seconds: float) -> int:
        before = int(ended.value())
        time.sleep(seconds)
        ended.assign_add(1)
        return int(ended.value()) - 1 - before

    c.await_workers()
    chance = random.Random(0)
    results = [c.coordinator.schedule(step, args=(chance.choice([0.0, 0.002, 0.03]),)) for _ in range(functions)]
    c.coordinator.join(timeout=60)
    return max(c.coordinator.fetch(results))


def test_the_bound_holds_under_uneven_workers(cluster: Any) -> None:
    assert largest_staleness(cluster(workers=3, ps=1), 60) > 2
    bounded = largest_staleness(cluster(workers=3, ps=1, max_staleness=2), 60)
    assert 0 < bounded <= 2


@pytest.mark.parametrize("bound", [0, 1, 5])
def test_the_bound_is_kept_and_used(bound: int) -> None:
    """Calls start and end at random: none sees more than ``bound`` others end, and so many are at work at once."""
    chance, staleness = random.Random(bound), Staleness(bound)
    working: dict[int, int] = {}
    most, widest = 0, 0
    for number in range(2000):
        while staleness.may_start() and (not working or chance.random() < 0.6):
            key = number * 100 + len(working)
            staleness.start(key)
            working[key] = 0
        widest = max(widest, len(working))
        if working:
            gone = chance.choice(list(working))
            most = max(most, working.pop(gone))
            staleness.end(gone)
            working = {k: n + 1 for k, n in working.items()}
    assert most == bound
    assert widest == bound + 1
