"""Sparse gradients of tables that are no ``nn.Embedding``: those of ``functional.embedding(sparse=True)`` stay rows."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from this_replica import replica
from torch import nn
from torch.nn import functional
from two_replicas import assert_all_close, built, flat_gradients, flat_weights, gradients, plain, weights

import tfstyle_dist as td

_RANKS = {"workers": 2, "timeout": 50, "deadline": 15}


@pytest.fixture(
    params=[
        "in_process",
        pytest.param("ranks", marks=pytest.mark.distributed(**_RANKS)),
        pytest.param("streamed", marks=pytest.mark.distributed(**_RANKS, env={"TFSTYLE_SHARED_MEMORY": "0"})),
        pytest.param("grouped", marks=pytest.mark.distributed(**_RANKS)),
    ]
)
def strategy(request: pytest.FixtureRequest) -> Iterator[td.Strategy]:
    """Two replicas in this process, or as ranks; or two workers of two replicas."""
    torch.set_num_threads(1)
    devices = ["cpu:0", "cpu:1"] if request.param in ("in_process", "grouped") else None
    kind = td.MultiWorkerMirroredStrategy if request.param == "grouped" else td.MirroredStrategy
    with kind(devices=devices) as made:
        yield made


class _Remainders(nn.Module):
    """Rows of two small tables, whose product stands for a row of a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.quotients, self.remainders = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4, 3))
        self.out = nn.Linear(3, 2)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        quotients = functional.embedding(numbers // 4, self.quotients, sparse=True)
        return self.out(quotients * functional.embedding(numbers % 4, self.remainders, sparse=True))


def _numbers(replicas: int, step: int) -> torch.Tensor:
    return torch.randint(0, 20, (4 * replicas,), generator=torch.Generator().manual_seed(step))


def _loss(model: nn.Module, numbers: torch.Tensor, step: int) -> torch.Tensor:
    return (model(numbers) * (numbers % 3 != step)[:, None]).square().mean()  # some rows get a gradient of zeros


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    tables = torch.optim.SparseAdam([model.quotients, model.remainders], lr=0.1)
    return [tables, torch.optim.Adam(model.out.parameters())]


def test_rows_are_updated_as_on_one_device(strategy: td.Strategy) -> None:
    model, reference = built(strategy, _Remainders), plain(_Remainders)
    mine, expected = _optimizers(model), _optimizers(reference)
    replicas = strategy.num_replicas_in_sync

    def step(k: int) -> None:
        for optimizer in mine:
            optimizer.zero_grad()
        _loss(model, _numbers(replicas, k).chunk(replicas)[replica()], k).backward()
        assert model.quotients.grad.is_sparse
        assert model.remainders.grad.is_sparse
        for optimizer in mine:
            optimizer.step()

    for k in range(4):
        strategy.run(step, args=(k,))
        for optimizer in expected:
            optimizer.zero_grad()
        _loss(reference, _numbers(replicas, k), k).backward()
        for optimizer in expected:
            optimizer.step()
    assert_all_close(weights(strategy, model)[[0, -1]], flat_weights(reference))


class _Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(4, 2))

    def forward(self, which: int) -> torch.Tensor:
        return functional.embedding(torch.tensor([1, 3, 3]), (self.a, self.b)[which], sparse=True).square().sum()


def test_replicas_use_different_tables(strategy: td.Strategy) -> None:
    model, reference = built(strategy, _Tables), plain(_Tables)
    replicas = strategy.num_replicas_in_sync

    def step(k: int) -> None:
        model((replica() + k) % 2 if k else 0).backward()
        assert model.a.grad.is_sparse
        assert k == 0 or model.b.grad.is_sparse

    for k in range(3):
        strategy.run(step, args=(k,))
        for r in range(replicas):
            (reference((r + k) % 2 if k else 0) / replicas).backward()
    assert_all_close(gradients(strategy, model)[[0, -1]], flat_gradients(reference))


def test_a_table_that_one_replica_uses_as_a_whole(strategy: td.Strategy) -> None:
    model, reference = built(strategy, _Tables), plain(_Tables)
    replicas = strategy.num_replicas_in_sync

    def loss(net: nn.Module, r: int) -> torch.Tensor:
        return net.a.sum() if r == 0 else net(0)

    def step() -> None:
        loss(model, replica()).backward()
        assert not model.a.grad.is_sparse

    for _ in range(2):
        strategy.run(step)
    for r in [*range(replicas), *range(replicas)]:
        (loss(reference, r) / replicas).backward()
    assert_all_close(gradients(strategy, model)[[0, -1]], flat_gradients(reference))


def test_only_new_rows_are_summed(strategy: td.Strategy) -> None:
    model, reference = built(strategy, _Tables), plain(_Tables)
    strategy.set_gradient_policy(scale="SUM")

    def step() -> None:
        for _ in range(2):
            model(0).backward()
        with strategy.accumulate():
            model(1).backward()
        model(1).backward()

    strategy.run(step)
    for which in (0, 0, 1, 1):
        (reference(which) * strategy.num_replicas_in_sync).backward()
    assert_all_close(gradients(strategy, model)[[0, -1]], flat_gradients(reference))


@pytest.mark.distributed(**_RANKS)
@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_table_that_is_gone_on_one_worker(rank: int, devices: list[str], sparse: bool) -> None:
    with td.MirroredStrategy(devices) as strategy:
        used = [built(strategy, _Tables), built(strategy, lambda: nn.Linear(2, 1))]

        def step(*models: nn.Module) -> None:
            for model in models:
                model.zero_grad()
            loss = models[-1](torch.ones(1, 2).double()).sum()
            for model in models[:-1]:
                loss = loss + (model(0) if sparse else model.a.square().sum())
            loss.backward()

        strategy.run(step, args=tuple(used))
        whole = used[0].a.grad.clone() if rank == 0 else None
        if rank:
            del used[0]
            gc.collect()
        strategy.run(step, args=tuple(used))
        if whole is not None:
            assert used[0].a.grad.is_sparse is sparse
            torch.testing.assert_close(used[0].a.grad, whole / 2)
        torch.testing.assert_close(used[-1].weight.grad, torch.ones(1, 2).double())


@pytest.mark.distributed(**_RANKS)
@pytest.mark.cpu_only("shares memory")
def test_ranks_with_one_copy_say_that_it_becomes_dense(caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(1)
    with caplog.at_level(logging.WARNING), td.experimental.CentralStorageStrategy() as strategy:
        model = built(strategy, _Tables)
        strategy.run(lambda: model(0).backward())
        assert not model.a.grad.is_sparse
    assert "The gradient of 'a' is sparse, and ranks that share one copy" in caplog.text


class _Sometimes(nn.Module):
    """A table whose gradient has rows, or all elements where a penalty is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 2))

    def forward(self, penalty: bool) -> torch.Tensor:
        total = functional.embedding(torch.tensor([replica()]), self.table, sparse=True).sum()
        return total + self.table.square().sum() if penalty else total


@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)])
def test_a_table_whose_gradient_is_of_another_kind_in_each_pass(strategy: td.Strategy, order: tuple[bool, ...]) -> None:
    model = built(strategy, _Sometimes)
    for penalty in order:

        def step(penalty: bool = penalty) -> torch.Tensor:
            model.zero_grad()
            model(penalty).backward()
            assert model.table.grad.is_sparse is not penalty
            return model.table.grad.to_dense()

        for own in strategy.experimental_local_results(strategy.run(step)):
            count = strategy.num_replicas_in_sync
            expected = torch.zeros(4, 2, dtype=own.dtype)
            expected[:count] += 1 / count
            torch.testing.assert_close(own, expected + 2 * penalty)


def test_a_sparse_gradient_by_more_than_rows_is_summed_as_dense(strategy: td.Strategy) -> None:
    model = built(strategy, _Sometimes)

    def step(first_alone: bool) -> torch.Tensor | None:
        model.zero_grad()
        if replica() == 0 or not first_alone:
            torch.gather(model.table, 1, torch.tensor([[replica() % 2]] * 4), sparse_grad=True).sum().backward()
        else:
            (model.table.sum() * 0.0).backward()
        return None if model.table.grad is None else model.table.grad.to_dense()

    count = strategy.num_replicas_in_sync
    for own in strategy.experimental_local_results(strategy.run(lambda: step(False))):
        torch.testing.assert_close(own, torch.full_like(own, 0.5))
    for own in strategy.experimental_local_results(strategy.run(lambda: step(True))):
        torch.testing.assert_close(own, torch.tensor([[1 / count, 0.0]] * 4, dtype=own.dtype))


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, now: bool) -> torch.Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.now:
            raise ValueError("a bad batch")
        return grads[0], None


class _TableAndOut(nn.Module):
    """The gradient of the last layer comes first; then the backward pass may raise, before that of the table."""

    def __init__(self, is_module: bool) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(6, 2, sparse=True), nn.Linear(2, 1, bias=False)
        self.is_module = is_module
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, numbers: torch.Tensor, breaks: bool) -> torch.Tensor:
        weight = self.table.weight
        rows = self.table(numbers) if self.is_module else functional.embedding(numbers, weight, sparse=True)
        return self.out(_Raises.apply(rows, breaks)).sum()


@pytest.mark.distributed(**_RANKS)
@pytest.mark.parametrize("is_module", [False, True])
def test_a_pass_that_one_rank_breaks_off(is_module: bool) -> None:
    _break_off(td.MirroredStrategy(), is_module)


@pytest.mark.distributed(**_RANKS, env={"TFSTYLE_SHARED_MEMORY": "0"})
@pytest.mark.parametrize("is_module", [False, True])
def test_a_pass_that_one_rank_breaks_off_without_shared_memory(is_module: bool) -> None:
    _break_off(td.MirroredStrategy(), is_module)


@pytest.mark.distributed(**_RANKS)
@pytest.mark.cpu_only("shares memory")
def test_a_pass_that_one_rank_over_one_copy_breaks_off() -> None:
    _break_off(td.experimental.CentralStorageStrategy(), True)


def _break_off(strategy: td.Strategy, is_module: bool) -> None:
    """The program goes on with the next batch, and so do the other ranks."""
    with strategy:
        model = built(strategy, partial(_TableAndOut, is_module))

        def step(number: int) -> torch.Tensor | None:
            model.zero_grad()
            try:
                model(torch.tensor([0, replica() + 1]), replica() == 1 and number == 1).backward()
            except ValueError:
                return None
            return model.table.weight.grad.to_dense()[:3, 0]

        for number in range(4):
            found = strategy.run(step, args=(number,))
            expected = [1.0, 0.5, 0.5] if number != 1 else [0.5, 0.5, 0.0]
            assert found is None if number == 1 and replica_of(strategy) == 1 else found.tolist() == expected


def replica_of(strategy: td.Strategy) -> int:
    return int(strategy.run(replica))


@pytest.mark.distributed(**_RANKS)
@pytest.mark.cpu_only("shares memory")
def test_a_momentum_of_rows_that_ranks_over_one_copy_share() -> None:
    with td.experimental.CentralStorageStrategy() as strategy:
        made = partial(nn.Embedding, 20, 4, sparse=True)
        model, reference = built(strategy, made), plain(made)
        mine, expected = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference))

        def step(k: int) -> None:
            mine.zero_grad()
            model(_numbers(2, k).chunk(2)[replica()]).square().mean().backward()
            mine.step()

        for k in range(4):
            strategy.run(step, args=(k,))
            expected.zero_grad()
            reference(_numbers(2, k)).square().mean().backward()
            expected.step()
        torch.testing.assert_close(model.weight.detach().clone(), reference.weight.detach())
