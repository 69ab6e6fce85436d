"""Parameters on the meta device, as functional modules keep them, have no values, and nothing is done to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfstyle_dist as tfd


@pytest.mark.parametrize("kind", [tfd.MirroredStrategy, tfd.experimental.CentralStorageStrategy])
def test_a_model_beside_one_without_values_is_trained(kind: Any) -> None:
    with kind(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model, shapes = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, device="meta")
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.fill_(5.0)

        def step() -> tuple[float, bool]:
            optimizer.zero_grad()
            model(torch.ones(1, 2, device=model.weight.device)).sum().backward()
            optimizer.step()
            return model.weight.sum().item(), shapes.weight.is_meta and shapes.weight.grad is None

        for number in range(1, 3):
            weights, stay = map(strategy.experimental_local_results, strategy.run(step))
            assert set(weights) == {10.0 - 2 * number}
            assert all(stay)
