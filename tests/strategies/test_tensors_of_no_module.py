"""Tensors that are trained without a module: temperatures, images, weights by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as tfd

pytestmark = pytest.mark.timeout(60)
MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "parameter": lambda: nn.Parameter(torch.tensor([0.5, 1.5])),
    "leaf": lambda: torch.tensor([0.5, 1.5], requires_grad=True),
}


def _train(strategy: Any, made: torch.Tensor, beside: nn.Module | None = None) -> torch.Tensor:
    others = [] if beside is None else list(beside.parameters())
    optimizer = torch.optim.Adam([made, *others], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (made * x - 1).square().mean() + (0 if beside is None else beside(x).square().mean())
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = torch.arange(16.0).reshape(8, 2) / 8
    for batch in strategy.experimental_distribute_dataset(torch.utils.data.DataLoader(data, batch_size=4)):
        strategy.run(step, args=(batch,))
    return made.detach().clone()


def _module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(2, 1)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("kind", [tfd.MirroredStrategy, tfd.experimental.CentralStorageStrategy])
@pytest.mark.parametrize("with_module", [False, True])
def test_adopted_it_is_trained_as_a_parameter(maker: str, kind: Any, with_module: bool) -> None:
    alone = tfd.OneDeviceStrategy("cpu:0")
    wanted = _train(alone, alone.experimental_adopt(MAKERS[maker]()), _module() if with_module else None)
    with kind(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            made = MAKERS[maker]()
            assert strategy.experimental_adopt(made) is made
            beside = _module() if with_module else None
        torch.testing.assert_close(_train(strategy, made, beside), wanted)
        strategy.experimental_adopt(made)  # again changes nothing
        assert len(strategy.experimental_local_results(strategy.run(lambda: made.detach().clone()))) == 2


@pytest.mark.distributed(workers=2, timeout=60)
def test_on_ranks_they_begin_with_the_first_ones_values(rank: int) -> None:
    for maker in MAKERS.values():
        alone = tfd.OneDeviceStrategy("cpu:0")
        wanted = _train(alone, maker(), _module())
        with tfd.MirroredStrategy(["cpu:0"]) as strategy:
            made = maker()
            with torch.no_grad():
                made.mul_(rank + 1)
            strategy.experimental_adopt(made)
            with strategy.scope():
                beside = _module()
            torch.testing.assert_close(_train(strategy, made, beside), wanted)


def test_the_error_without_it_says_what_to_write() -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            made, beside = nn.Parameter(torch.ones(2)), _module()
        with pytest.raises(RuntimeError, match=r"experimental_adopt\(tensor\) for a tensor of no module"):
            _train(strategy, made)
        with pytest.raises(RuntimeError, match=r"experimental_adopt\(tensor\) for a tensor of no module"):
            _train(strategy, made, beside)


def test_one_without_a_shape_is_refused() -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, pytest.raises(ValueError, match="has no shape yet"):
        strategy.experimental_adopt(nn.UninitializedParameter())


def test_a_tensor_that_is_not_trained_stays_each_replicas_own() -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        count = strategy.experimental_adopt(torch.zeros(1))

        def add() -> torch.Tensor:
            count.add_(1.0 + tfd.get_replica_context().replica_id_in_sync_group)
            return count.clone()

        assert [float(v) for v in strategy.run(add).values] == [1.0, 2.0]
