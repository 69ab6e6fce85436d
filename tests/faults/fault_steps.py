"""Steps that several fault tests use, and what must still work after a fault."""

from __future__ import annotations

from typing import Any

import torch

import tfstyle_dist as td
from tfstyle_dist.runtime import context

TWO, THREE = ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1", "cpu:2"]


class ReplicaFault(Exception):
    """What a replica raises in these tests."""


def replica_id() -> int:
    replica = td.get_replica_context()
    assert replica is not None
    return replica.replica_id_in_sync_group


def all_reduce(value: float = 1.0) -> Any:
    replica = td.get_replica_context()
    assert replica is not None
    return replica.all_reduce("SUM", torch.tensor(value))


def merge(fn: Any = lambda strategy: None) -> Any:
    replica = td.get_replica_context()
    assert replica is not None
    return replica.merge_call(fn)


def assert_usable(strategy: Any) -> None:
    """The context stack is clean, and a run with every kind of meeting works."""
    assert context.current_frame() is None
    count = strategy.num_replicas_in_sync
    assert strategy.run(all_reduce).values == (count,) * count
    assert strategy.run(lambda: merge(lambda s: 5)) == 5
    model, optimizer = build(strategy)
    before = model.weight.detach().clone()
    strategy.run(lambda: train_step(model, optimizer))
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def train_step(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, model.in_features)).sum().backward()
    optimizer.step()


def build(strategy: Any, features: int = 1) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    with strategy.scope():
        model = torch.nn.Linear(features, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
