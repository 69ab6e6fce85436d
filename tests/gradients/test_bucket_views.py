"""Gradients that are summed where they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from two_replicas import replica

import tfstyle_dist as td
from tfstyle_dist.comm.collectives.flat import Flat
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
    sum_flat, sum_buffer = group.all_reduce_flat, group.all_reduce

    def log_flat(values: Flat, name: str, method: int = 0) -> None:
        sent.append(values.numel)
        sum_flat(values, name, method)

    def log_buffer(buffer: torch.Tensor, name: str, method: int = 0) -> None:
        sent.append(-buffer.numel())
        sum_buffer(buffer, name, method)

    monkeypatch.setattr(group, "all_reduce_flat", log_flat)
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
