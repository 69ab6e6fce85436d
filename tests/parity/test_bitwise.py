"""Two replicas of one process are two ranks bit for bit, also with dropout, and every run equals the last one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import BATCH, CASES
from torch import nn
from training import PLAIN, Weights, share, values_of

import tfstyle_dist as tfd

STEPS = 6
EVEN = (BATCH // 2, BATCH // 2)
LAYERS = (nn.Linear, nn.Conv2d, nn.Embedding)


def dropping(model: nn.Module) -> nn.Module:
    """Drops parts of what the layers make."""

    def drop(module: nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(made, 0.2)

    for module in list(model.modules()):
        if isinstance(module, LAYERS):
            module.register_forward_hook(drop)
    return model


def trained(strategy: tfd.Strategy, name: str, optimizer_name: str, seed: int | None = 5) -> Weights:
    torch.manual_seed(11)
    with strategy.scope():
        model = dropping(CASES[name].build())
        optimizer = PLAIN[optimizer_name](model.parameters())
    if seed is not None:
        strategy.seed_replicas(seed)

    def step(*batch: torch.Tensor) -> None:
        context = tfd.get_replica_context()
        assert context is not None
        own = share(batch, EVEN, context.replica_id_in_sync_group)
        optimizer.zero_grad()
        model(*own).mean().backward()
        optimizer.step()

    for batch in CASES[name].batches(STEPS, torch.float32):
        strategy.run(step, args=batch)
    return values_of(model)


@pytest.mark.distributed(workers=2)
@pytest.mark.parametrize("optimizer", PLAIN)
@pytest.mark.parametrize("name", CASES)
def test_one_process_is_two_ranks(rank: int, monkeypatch: pytest.MonkeyPatch, name: str, optimizer: str) -> None:
    torch.set_num_threads(1)
    with tfd.MirroredStrategy() as ranks:
        expected = trained(ranks, name, optimizer)
    if rank == 0:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(variable, raising=False)
        with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as replicas:
            assert replicas.num_replicas_in_sync == 2
            found = trained(replicas, name, optimizer)
        different = [key for key in expected if not torch.equal(expected[key], found[key])]
        assert different == []


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("name", CASES)
def test_every_run_equals_the_last_one(name: str, seed: int | None) -> None:
    torch.set_num_threads(1)
    runs = []
    for _ in range(2):
        with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            runs.append(trained(strategy, name, "adam", seed))
    assert all(torch.equal(runs[0][key], runs[1][key]) for key in runs[0])
