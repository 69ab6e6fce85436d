"""Gradients that ``backward(create_graph=True)`` left are differentiated once more."""

from __future__ import annotations

import copy

import pytest
import torch
from this_replica import replica
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.testing.strategies import strategy_combinations


@strategy_combinations("mirrored_2", "mirrored_2_workers", "mirrored_2_workers_2_replicas", timeout=90)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_penalty_on_the_gradients_that_backward_left(strategy: td.Strategy) -> None:
    """Several replicas on each of several workers too."""
    count = strategy.num_replicas_in_sync
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * count, 3, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = strategy.experimental_adopt(copy.deepcopy(reference))
    optimizers = {net: torch.optim.SGD(net.parameters(), 0.1) for net in (model, reference)}

    def penalised(net: nn.Module, x: torch.Tensor) -> None:
        net(x).square().mean().backward(create_graph=True)
        slopes = [p.grad for p in net.parameters()]
        net.zero_grad()
        sum(slope.square().sum() for slope in slopes).backward()
        optimizers[net].step()
        net.zero_grad()

    for _ in range(3):
        strategy.run(lambda: penalised(model, x.chunk(count)[replica()]))
        penalised(reference, x)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-10, atol=1e-12)
