"""Gradients that are summed where they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from this_replica import replica
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.comm.collectives.flat import Flat
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.gradients.bucket_views import BucketViews

SHAPES = [torch.Size(s) for s in ((3,), (), (0, 4), (5, 7), (2, 3, 4), (50,))]


def add(parts: Any, out: torch.Tensor) -> None:
    torch.sum(torch.stack(list(parts)), 0, out=out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [1, 8, 64, 1000])
def test_pieces_are_one_vector(dtype: torch.dtype, step: int) -> None:
    grads = [torch.randn(shape).to(dtype) for shape in SHAPES]
    vector = torch.cat([g.reshape(-1) for g in grads]).float()
    expected = ((vector + 1.0) / 2).to(dtype)
    views = BucketViews(SHAPES, torch.float32, 2)
    assert views.numel == vector.numel()
    for _ in range(2):  # the second time from what it remembers
        current = [g.clone() for g in grads]
        views.grads = current
        for start in range(0, views.numel, step):
            stop = min(start + step, views.numel)
            slots = [torch.full((step + 5,), torch.nan), torch.ones(step + 5)]
            views.read(start, stop, slots[0])
            torch.testing.assert_close(slots[0][: stop - start], vector[start:stop], rtol=0, atol=0)
            views.write(start, stop, slots, add, own=0)
        torch.testing.assert_close(torch.cat([g.reshape(-1) for g in current]), expected, rtol=0, atol=0)


def test_the_sum_of_somebody_else_is_divided_and_copied() -> None:
    views = BucketViews(SHAPES, torch.float32, 4)
    views.grads = [torch.zeros(shape) for shape in SHAPES]
    views.write(0, views.numel, [torch.arange(200.0)], add)
    got = torch.cat([g.reshape(-1) for g in views.grads])
    torch.testing.assert_close(got, torch.arange(float(views.numel)) / 4)


@pytest.mark.distributed(workers=2)
def test_only_what_was_used_is_sent(strategy: td.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the training of a GAN: a backward pass through one network does not send the other one."""
    with strategy.scope():
        torch.manual_seed(0)
        nets = nn.ModuleList([nn.Linear(3, 2), nn.Linear(5, 4), nn.Linear(5, 4)])
    group = strategy.worker.group
    sent: list[int] = []
    sum_variant, sum_buffer = group.all_reduce_variant, group.all_reduce

    def log_variant(values: Flat, name: str, method: int, variant: int, call: str) -> bool:
        alike = sum_variant(values, name, method, variant, call)
        if alike:
            sent.append(values.numel)
        return alike

    def log_buffer(buffer: torch.Tensor, name: str, method: int = 0) -> None:
        sent.append(-buffer.numel())
        sum_buffer(buffer, name, method)

    monkeypatch.setattr(group, "all_reduce_variant", log_variant)
    monkeypatch.setattr(group, "all_reduce", log_buffer)

    def backward(number: int) -> None:
        nets.zero_grad()
        net: Any = nets[number]
        net(torch.full((1, net.in_features), 1.0 + replica())).sum().backward()

    for number, numel in ((0, 8), (1, 24), (0, 8)):
        strategy.run(backward, args=(number,))
        assert sent.pop() == numel
        torch.testing.assert_close(nets[number].weight.grad, torch.full_like(nets[number].weight, 1.5))
        assert nets[1 - number].weight.grad is None
    assert not sent
    strategy.run(lambda: backward(1 + replica()))  # each worker another one: all travel, with a flag for each parameter
    assert sent == [-(8 + 24 + 24 + 6)]
    for number in (1, 2):
        torch.testing.assert_close(nets[number].weight.grad, torch.full_like(nets[number].weight, number / 2))


@pytest.mark.distributed(workers=2)
def test_workers_that_use_other_parameters_meet_in_every_pass(strategy: td.Strategy) -> None:
    """They find out where they meet for the sum, and tell each other before it for a while; then all is as before."""
    with strategy.scope():
        torch.manual_seed(0)
        rows = nn.Embedding(4, 2, sparse=True)
        nets = nn.ModuleList([nn.Linear(3, 2), nn.Linear(300, 200)])

    def backward(uses: tuple[bool, bool, bool]) -> None:
        nets.zero_grad()
        rows.zero_grad()
        total = torch.zeros(())
        for net, used in zip(nets, uses, strict=False):
            if used:
                total = total + net(torch.full((1, cast(nn.Linear, net).in_features), 1.0 + replica())).sum()
        if uses[2]:
            total = total + rows(torch.tensor([replica()])).sum()
        total.backward()

    passes: list[tuple[tuple[bool, bool, bool], tuple[bool, bool, bool]]] = [
        ((True, True, True), (True, True, True)),
        ((True, False, False), (False, True, False)),
        ((False, False, True), (True, False, False)),
        ((False, False, True), (False, False, True)),
        *[((True, True, False), (True, True, False))] * 101,  # now nobody asks first
        ((False, False, True), (True, True, False)),
        ((False, False, True), (False, False, True)),
    ]
    for uses in passes:
        strategy.run(backward, args=(uses[strategy.worker.group.rank],))
        for number, net in enumerate(nets):
            expected = sum((1.0 + r) / 2 for r in range(2) if uses[r][number])
            grad = cast(nn.Linear, net).weight.grad
            if expected:
                torch.testing.assert_close(grad, torch.full_like(cast(nn.Linear, net).weight, expected))
            else:
                assert grad is None or not grad.any()
        if any(used for *_, used in uses):
            assert rows.weight.grad is not None
            expected_rows = torch.tensor([[0.5 if r < 2 and uses[r][2] else 0.0] * 2 for r in range(4)])
            torch.testing.assert_close(rows.weight.grad.to_dense(), expected_rows)


@pytest.mark.distributed(workers=2)
def test_a_worker_that_makes_another_call_is_named(strategy: td.Strategy) -> None:
    with strategy.scope():
        net = nn.Linear(3, 2)

    def step(differs: bool) -> None:
        if differs and not replica():
            td.get_replica_context().all_reduce("sum", torch.ones(6))
        else:
            net(torch.ones(1, 3)).sum().backward()

    strategy.run(step, args=(False,))
    with pytest.raises(CollectiveMismatchError, match=r"(?s)worker 0: all_reduce.*worker 1: gradients of one backward"):
        strategy.run(step, args=(True,))


@pytest.mark.distributed(workers=2)
def test_complex_gradients_keep_no_memory(strategy: td.Strategy) -> None:
    """They are not summed in shared memory but in a buffer, which is gone after each step."""
    with strategy.scope():
        layers = nn.ModuleList([nn.Linear(250, 1000, bias=False, dtype=torch.complex64) for _ in range(2)])
    nbytes = 2 * 250 * 1000 * 8

    def step() -> None:
        layers.zero_grad()
        total: Any = sum((layer.weight * (1.0 + replica())).sum() for layer in layers)
        total.real.backward()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(5):
        strategy.run(step)
    before = resident()
    for _ in range(40):
        strategy.run(step)
    assert resident() - before < 10 * nbytes
    for layer in layers:
        torch.testing.assert_close(layer.weight.grad, torch.full_like(layer.weight, 1.5))
