"""Uneven last batches: three replicas train to the weights of one device; BatchNorm does what docs/input.md says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as td

BATCH = 6


def data(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(size, 1, generator=generator))


def model(norm: bool = False) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 1))


def here() -> Any:
    """Where the calling replica is."""
    context = td.get_replica_context()
    assert context is not None
    return context.strategy.worker.torch_device(context.local_replica_id)


def train(strategy: td.Strategy, size: int, style: str, epochs: int = 3) -> list[torch.Tensor]:
    loader = DataLoader(data(size), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    batches = strategy.experimental_distribute_dataset(loader)
    with strategy.scope():
        net = model()
        styled = td.train.MomentumOptimizer(0.05, 0.9) if style == "tf" else None
        plain = torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-3) if styled is None else None
    if plain is not None:
        strategy.set_gradient_policy(scale="SUM")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = td.nn.compute_average_loss((net(x) - y).square().sum(1), global_batch_size=BATCH)
        if styled is not None:
            styled.minimize(loss, var_list=list(net.parameters()))
            return
        assert plain is not None
        plain.zero_grad()
        loss.backward()
        plain.step()

    for _ in range(epochs):
        for batch in batches:
            strategy.run(step, args=tuple(batch))
    return [p.detach().clone() for p in net.parameters()]


# 19: the last batch is 1 example, so two of three replicas get none; 23: 2, 2, 1; 20: 1, 1, 0
@pytest.mark.parametrize("style", ["tf", "plain"])
@pytest.mark.parametrize("size", [19, 20, 23])
def test_three_replicas_train_like_one(size: int, style: str) -> None:
    with td.OneDeviceStrategy("cpu") as one, td.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as three:
        expected, found = train(one, size, style), train(three, size, style)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.distributed(workers=3, timeout=90, deadline=30)
@pytest.mark.parametrize("style", ["tf", "plain"])
def test_three_ranks_train_like_one(style: str) -> None:
    with td.MirroredStrategy() as three:
        found = train(three, 19, style)
    with td.OneDeviceStrategy("cpu") as one:
        expected = train(one, 19, style)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_batch_norm_statistics_are_the_mean_of_the_replicas() -> None:
    """A replica without examples keeps its statistics; the named point of synchronization takes the mean of all."""
    rows = data(14)  # batches of 6, 6 and 2; three replicas get 2, 2, 2 twice
    shares = [[rows.tensors[0][b : b + 2] for b in (0, 6)], [rows.tensors[0][b : b + 2] for b in (2, 8)]]
    shares.append([rows.tensors[0][b : b + 2] for b in (4, 10)])
    copies = [copy.deepcopy(model(norm=True)) for _ in range(3)]
    for net, parts in zip(copies, shares, strict=True):
        for part in [*parts, rows.tensors[0][:0]]:
            net(part)
    expected = torch.stack([net[1].running_var for net in copies]).mean(0)

    with td.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        drawn = model(norm=True).state_dict()
        with strategy.scope():
            net = model(norm=True)
        net.load_state_dict(drawn)  # a GPU would draw others
        for x, _ in strategy.experimental_distribute_dataset(
            TensorDataset(*(t[:12] for t in rows.tensors)), global_batch_size=6
        ):
            strategy.run(lambda part: [net(part), None][1], args=(x,))
        strategy.run(lambda: [net(torch.empty(0, 4, device=here())), None][1])
        strategy.sync_buffers()
        found: Any = net[1].running_var  # type: ignore[index]
        torch.testing.assert_close(found.detach().clone(), expected)


def test_an_empty_share_weighs_nothing() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        (batch,) = strategy.experimental_distribute_dataset([torch.tensor([[3.0, 5.0]])])
        with strategy.scope():
            norm = nn.BatchNorm2d(2)
        before = norm.running_mean.detach().clone()  # type: ignore[union-attr]
        means = strategy.run(lambda x: [x.mean(), len(x)], args=(batch,))
        assert float(td.experimental.exact_mean(*means, strategy=strategy)) == 4.0
        assert float(strategy.reduce("MEAN", batch, axis=0).sum()) == 8.0
        strategy.run(lambda: [norm(torch.empty(0, 2, 3, 3, device=here())), None][1])
        strategy.sync_buffers()
        assert torch.equal(norm.running_mean, before)  # type: ignore[arg-type]


@pytest.mark.distributed(workers=2)
def test_a_rank_whose_loader_has_ended(rank: int) -> None:
    """Its mean loss is NaN, and its gradient that of the other rank, as in a loop over the other's examples alone."""
    with td.MirroredStrategy() as strategy:
        with strategy.scope():
            model = nn.Linear(3, 1)
            nn.init.ones_(model.weight)
        alone = nn.Linear(3, 1)
        data = torch.arange(12.0).view(4, 3)

        def loader(context: td.distribute.InputContext) -> DataLoader[Any]:
            return DataLoader(TensorDataset(data[: 4 - 2 * context.input_pipeline_id]), batch_size=2)

        def step(x: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        for number, batch in enumerate(strategy.distribute_datasets_from_function(loader)):
            loss = strategy.run(step, args=batch)
            alone.load_state_dict(model.state_dict())
            alone.zero_grad()
            expected = alone(data[2 * number : 2 * number + 2]).square().mean()
            expected.backward()
            torch.testing.assert_close(model.weight.grad, alone.weight.grad)
            torch.testing.assert_close(strategy.reduce("MEAN", loss, axis=None), expected.detach())
            assert bool(loss.isnan()) is (number == 1 and rank == 1)
        assert number == 1


def test_an_error_of_an_empty_share_says_that_it_is_one() -> None:
    """As torchmetrics that cannot take an empty tensor raise torch's own words."""
    with td.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        (batch,) = strategy.experimental_distribute_dataset(DataLoader(data(2), batch_size=3))
        with pytest.raises(IndexError, match="non-zero size") as error:
            strategy.run(lambda rows: rows.max(0).values, args=(batch[0],))
        assert "this replica's share of the batch was empty. Leave out there" in " ".join(error.value.__notes__)
        with pytest.raises(ZeroDivisionError) as error:
            strategy.run(lambda rows: 1 / (len(rows) - 1), args=(batch[0],))
        assert "was empty" not in " ".join(error.value.__notes__)
