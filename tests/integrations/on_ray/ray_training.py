"""Training functions for Ray's workers, which import this file."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

import tfstyle_dist as tfd

STEPS = 6
DATA = torch.arange(24.0).view(8, 3) / 10


def make(strategy: tfd.Strategy) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step() -> torch.Tensor:
        replica = tfd.get_replica_context()
        assert replica is not None
        share = DATA.chunk(replica.num_replicas_in_sync)[int(replica.replica_id_in_sync_group)]
        optimizer.zero_grad()
        loss = model(share).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def weights_of(model: torch.nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def expected(steps: int = STEPS) -> list[float]:
    with tfd.OneDeviceStrategy("cpu:0") as strategy:
        model, optimizer = make(strategy)
        step = step_of(model, optimizer)
        for _ in range(steps):
            strategy.run(step)
        return weights_of(model)


def train(config: dict[str, Any]) -> None:
    """Trains, reports each step, goes on from a checkpoint; in its first life one worker kills itself if asked to."""
    import ray.train

    strategy = tfd.MirroredStrategy()
    model, optimizer = make(strategy)
    checkpoint = tfd.train.Checkpoint(model=model, optimizer=optimizer, step=0)
    manager = tfd.train.CheckpointManager(checkpoint, config["folder"], max_to_keep=2)
    manager.restore_or_initialize()
    step = step_of(model, optimizer)
    while checkpoint.step < STEPS:
        losses = strategy.run(step)
        loss = float(strategy.reduce("MEAN", losses, axis=None))
        checkpoint.step += 1
        manager.save()
        ray.train.report({"loss": loss, "step": checkpoint.step, "replicas": strategy.num_replicas_in_sync})
        died = Path(config["folder"]) / "died"
        if (
            config.get("kill") == checkpoint.step
            and ray.train.get_context().get_world_rank() == 1
            and not died.exists()
        ):
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    import torch.distributed as dist

    facts = {"initialised": dist.is_initialized(), "timeout": strategy.worker.group.timeout.total_seconds()}
    if strategy.is_chief:  # fit() returns metrics only of reports that have a checkpoint of Ray's
        told = {
            "weights": weights_of(model),
            "step": checkpoint.step,
            "replicas": strategy.num_replicas_in_sync,
            **facts,
        }
        (Path(config["folder"]) / "result.json").write_text(json.dumps(told))
    strategy.close()
    if config.get("adopted"):
        dist.barrier()  # Ray's group is still there


def refuse(config: dict[str, Any]) -> None:
    """Worker 1 leaves at once: the others must say so."""
    import ray.train

    strategy = tfd.MirroredStrategy()
    if ray.train.get_context().get_world_rank() == 1:
        raise ZeroDivisionError("worker 1 has had enough")
    strategy.gather(torch.ones(1), axis=0)
