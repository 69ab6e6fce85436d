"""Functions on workers and optimizers on servers make tensors of the default type of the coordinator's program."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(model: nn.Module, optimizer: Any, number: int) -> float:
    optimizer.zero_grad()
    loss = model(torch.randn(8, 3, generator=torch.Generator().manual_seed(number))).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_a_function_makes_tensors_of_the_programs_default_type(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)

    def made() -> tuple[torch.dtype, torch.Tensor]:
        return torch.zeros(2).dtype, torch.tensor(0.1)

    def kept() -> torch.dtype:
        return torch.zeros(1).dtype

    assert made()[0] is torch.float32
    assert c.coordinator.schedule(kept).fetch() is torch.float32
    torch.set_default_dtype(torch.float64)  # the fixture of all tests sets it back
    for _ in range(2):
        dtype, value = c.coordinator.schedule(made).fetch()
        assert dtype is torch.float64
        assert float(value) == 0.1  # that of float32 is 0.10000000149
        c.kill("worker", 0)
        c.start("worker", 0)
    torch.set_default_dtype(torch.float32)
    assert c.coordinator.schedule(kept).fetch() is torch.float32


@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.NAdam])
def test_servers_make_state_of_the_programs_default_type(cluster: Any, kind: Any) -> None:
    """ASGD keeps its rate, NAdam a product of its decays in a tensor of the default type."""
    c = cluster(workers=1, ps=2)
    torch.set_default_dtype(torch.float64)  # the fixture of all tests sets it back
    with c.strategy.scope():
        model = build()
    optimizer = kind(model.parameters(), lr=0.05)
    alone = build()
    alone_optimizer = kind(alone.parameters(), lr=0.05)
    losses = [c.coordinator.schedule(lambda n=n: train(model, optimizer, n)).fetch() for n in range(4)]
    expected = [train(alone, alone_optimizer, n) for n in range(4)]
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
