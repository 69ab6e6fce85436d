"""A small model, its batches, and what it must come to on one device: for the tests of shares of different sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as td

Batch = tuple[torch.Tensor, torch.Tensor]
two_by_two = pytest.mark.distributed(workers=2, timeout=90, deadline=30)


def rows(count: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + torch.randn(count, 1, generator=generator, dtype=torch.float64)


class Net(nn.Module):
    """A learned factor stands before the loss, as in losses of several tasks: NaN times it has a gradient of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.inner(x), y) * torch.exp(-self.factor) + 0.1 * self.factor**2


def built() -> Net:
    torch.manual_seed(2)
    return Net().double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-3)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def on_one_device(batches: list[Batch], epochs: int = 1) -> tuple[torch.Tensor, list[float]]:
    model, losses = built(), []
    optimizer = adam(model)
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return flat(model), losses


def trained(strategy: td.Strategy, dataset: Any, epochs: int = 1) -> tuple[torch.Tensor, list[float]]:
    """The weights, the same on every replica, and the mean over the replicas of each step's loss."""
    with strategy.scope():
        model = built()
    optimizer, losses = adam(model), []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(epochs):
        for batch in dataset:
            losses.append(float(strategy.reduce("MEAN", strategy.run(step, args=tuple(batch)), axis=None)))
    return same_everywhere(strategy, model), losses


def same_everywhere(strategy: td.Strategy, model: nn.Module) -> torch.Tensor:
    def gather() -> torch.Tensor:
        context = td.get_replica_context()
        assert context is not None
        return context.all_gather(flat(model).unsqueeze(0), axis=0)

    every: torch.Tensor = strategy.experimental_local_results(strategy.run(gather))[0]
    assert all(torch.equal(row, every[0]) for row in every)
    return every[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def gradients_of(strategy: td.Strategy, batch: Any, model: nn.Module, **policy: Any) -> torch.Tensor:
    """The reduced gradients of one backward pass, as the first replica of this worker has them."""
    if policy:
        strategy.set_gradient_policy(**policy)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        model(x, y).backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])

    found: torch.Tensor = strategy.experimental_local_results(strategy.run(step, args=batch))[0]
    return found


def plain_gradients(model: nn.Module, *batches: Batch, weights: tuple[float, ...] = (1.0,)) -> torch.Tensor:
    model = copy.deepcopy(model)
    for weight, batch in zip(weights, batches, strict=True):
        (weight * model(*batch)).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
