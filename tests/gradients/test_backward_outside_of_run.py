"""Where no replica has its turn: workers of several replicas sum nothing there, and say so."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.core.logging import _said


@pytest.mark.distributed(workers=2, timeout=50, deadline=15)
def test_gradients_of_several_workers_of_several_replicas_are_said(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    _said.discard("a backward pass outside of run")
    other = nn.Linear(3, 2)
    with td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy, caplog.at_level(logging.WARNING):
        with strategy.scope():
            model = nn.Linear(3, 2)
        x = torch.full((1, 3), 1.0 + rank, requires_grad=True)
        strategy.run(lambda: model(x.detach()).sum().backward())
        other(x).sum().backward()
        torch.autograd.grad(model(x).sum(), x)
        assert not caplog.messages
        for _ in range(2):
            model(x).sum().backward()
    (said,) = caplog.messages
    assert "2 workers of 2 replicas each" in said
    assert "strategy.run(step, args=...)" in said
