"""One model that two ranks over central storage train, each on half of a batch, and one device on all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.shm import pages

on_two_ranks = pytest.mark.distributed(workers=2, timeout=60, deadline=15)


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 20, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def loss_of(model: nn.Module, part: slice, step: int) -> torch.Tensor:
    x, y = batch(step)
    return (model(x[part]) - y[part]).pow(2).mean()


def own_half() -> slice:
    context = td.get_replica_context()
    assert context is not None
    return slice(context.replica_id_in_sync_group * 4, context.replica_id_in_sync_group * 4 + 4)


def train(strategy: Any, model: nn.Module, optimizer: Any, steps: range) -> None:
    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, own_half(), number).backward()
        optimizer.step()

    for number in steps:
        strategy.run(step, args=(number,))


def train_plainly(model: nn.Module, optimizer: Any, steps: range) -> None:
    for number in steps:
        optimizer.zero_grad()
        loss_of(model, slice(0, 8), number).backward()
        optimizer.step()


def is_own(tensor: torch.Tensor) -> bool:
    """Whether this process has a copy of pages in which a tensor lies."""
    inside = tensor.data_ptr() % pages.PAGE
    return pages.has_copied_pages(tensor.data_ptr() - inside, inside + tensor.nbytes)


def assert_same_weights(model: nn.Module, plain: nn.Module, tolerance: float = 1e-10) -> None:
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=tolerance, atol=tolerance)
