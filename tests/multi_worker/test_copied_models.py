"""Models that come into a scope from outside: copied, or loaded whole."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from this_replica import replica
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.testing.strategies import NamedStrategy, strategy_combinations

_central = NamedStrategy("central_2", lambda: td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0"))


def _loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("brought", [copy.deepcopy, _loaded])
@strategy_combinations("mirrored_2", "mirrored_2_workers", "mirrored_2_workers_2_replicas", _central, timeout=90)
def test_steps_without_an_optimizer(strategy: td.Strategy, brought: Callable[[nn.Module], nn.Module]) -> None:
    """Nothing but the scope says that the model is the strategy's: no optimizer is made, nothing is adopted."""
    count = strategy.num_replicas_in_sync
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4).eval(), nn.Linear(4, 1)).double()
    with strategy.scope():
        model = brought(reference)
    x = torch.randn(4 * count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def update(net: nn.Module, x: torch.Tensor) -> None:
        net.zero_grad()
        net(x).square().mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad

    for _ in range(3):
        strategy.run(lambda: update(model, x.chunk(count)[replica()]))
        update(reference, x)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-10, atol=1e-12)
