"""A model that is dropped takes its parameters out of the reduction; the strategy goes on with the others."""

from __future__ import annotations

import gc

import pytest
import torch

import tfstyle_dist as td


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


@pytest.mark.distributed(workers=2, timeout=60)
@pytest.mark.parametrize("only_on_rank", [None, 1])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_training_goes_on(rank: int, only_on_rank: int | None, sparse: bool, devices: list[str]) -> None:
    with td.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            first = torch.nn.Embedding(4, 3, sparse=True) if sparse else torch.nn.Linear(3, 3)
            second = torch.nn.Linear(3, 2)
        models = [first, second]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        inputs = [torch.tensor([rank, 2]) if sparse else torch.ones(2, 3), torch.full((2, 3), rank + 1.0)]
        for model, optimizer, x in zip(models, optimizers, inputs, strict=True):
            strategy.run(step, args=(model, optimizer, x))
        before = second.weight.detach().clone()
        del first, model, optimizer
        if only_on_rank in (None, rank):
            del models[0], optimizers[0]
        gc.collect()
        strategy.run(step, args=(models[-1], optimizers[-1], inputs[-1]))
        # The gradient of a weight is the column sum of x: 2 on rank 0, 4 on rank 1, 3 in the mean.
        torch.testing.assert_close(second.weight.detach(), before - 0.3)
