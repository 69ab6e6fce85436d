"""Ranks on devices, of their own where there are enough; started with what to show."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from device_kind import KIND, load_kind
from torch.utils.checkpoint import checkpoint

import tfstyle_dist as td

RANK = int(os.environ["RANK"])


def strategy_of(implementation: str, limit: float = 60.0) -> td.MirroredStrategy:
    options = td.experimental.CommunicationOptions(implementation=implementation, timeout_seconds=limit)
    return td.MirroredStrategy([DEVICE], communication_options=options)


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps({"rank": RANK, **facts}) + "\n")
    sys.stdout.flush()


def train(implementation: str) -> None:
    strategy = strategy_of(implementation)
    torch.manual_seed(RANK)
    with strategy.scope():
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    calls = getattr(torch.distributed.group.WORLD, "calls", [])
    for kind in ("plain", "checkpoint", "reentrant"):

        def step(x: torch.Tensor, kind: str = kind) -> None:
            optimizer.zero_grad()
            h = model[0](x)
            h = model[1](h) if kind == "plain" else checkpoint(model[1], h, use_reentrant=kind == "reentrant")
            (model[2](h) ** 2).sum().backward()
            optimizer.step()

        for _ in range(3):
            strategy.run(step, args=(torch.full((2, 3), 1.0 + RANK, device=DEVICE),))
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        say(kind=kind, weights=weights.cpu().tolist(), device=str(weights.device))
    say(current=str(torch.ones(1, device=KIND).device), library=len(calls) > 0)
    strategy.close()


def values(implementation: str) -> None:
    strategy = strategy_of(implementation)
    x, half = torch.full((2, 2), 1.0 + RANK, device=DEVICE), torch.full((2,), 1.0 + RANK, device=DEVICE).half()
    context = td.get_replica_context
    cases = {
        "reduce": lambda: strategy.reduce("SUM", x, axis=None),
        "reduce of a CPU value": lambda: strategy.reduce("SUM", torch.tensor(3), axis=None),
        "reduce rows": lambda: strategy.reduce("SUM", x, axis=0),
        "mean of rows": lambda: strategy.reduce("MEAN", x, axis=0),
        "mean of halves": lambda: strategy.reduce("MEAN", half, axis=None),
        "all_reduce": lambda: strategy.run(lambda: context().all_reduce("SUM", x)),
        "all_reduce of a CPU value": lambda: strategy.run(lambda: context().all_reduce("SUM", torch.ones(2))),
        "all_gather": lambda: strategy.run(lambda: context().all_gather(x, 0)),
        "all_gather of uneven CPU values": lambda: strategy.run(lambda: context().all_gather(torch.ones(1 + RANK), 0)),
        "gather": lambda: strategy.gather(x, 0),
    }
    for name, case in cases.items():
        say(name=name, value=case().float().cpu().reshape(-1).tolist())
    strategy.close()


def library(_: str) -> None:
    """Every collective of a group of one rank that the accelerator's library carries."""
    from datetime import timedelta

    import torch.distributed as dist

    from tfstyle_dist.comm.torch_group import TorchGroup

    backend = f"cpu:gloo,{KIND}:{dist.get_default_backend_for_device(KIND)}"
    dist.init_process_group(backend, rank=0, world_size=1)
    group = TorchGroup(dist.group.WORLD, timedelta(seconds=30), None, backend, dist.destroy_process_group)
    made = {
        "all_reduce": lambda x: group.all_reduce(x, "sum") or x,
        "reduce_scatter": lambda x: group.reduce_scatter(x, "scatter"),
        "all_gather": lambda x: group.all_gather(x, "gather")[0],
        "broadcast": lambda x: group.broadcast(x, 0, "broadcast") or x,
    }
    for name, call in made.items():
        for where in (DEVICE, "cpu"):
            x = torch.arange(4.0, device=where)
            result = call(x)
            say(name=f"{name} of {where}", value=result.cpu().tolist(), kept=result.device == x.device)
    group.close()


def lost(how: str) -> None:
    strategy = strategy_of("AUTO", limit=4.0)
    with strategy.scope():
        model = torch.nn.Linear(3, 3)

    def step() -> None:
        model(torch.ones(2, 3, device=DEVICE)).sum().backward()

    strategy.run(step)
    if RANK == 1:
        if how == "stuck":
            time.sleep(20)
        os._exit(0)
    try:
        strategy.run(step)
    except (td.errors.PeerLostError, td.errors.DeadlineExceededError) as error:
        say(error=type(error).__name__, says="Worker 1 is missing" in str(error))
        os._exit(0)


if __name__ == "__main__":
    count = load_kind().device_count()
    DEVICE = f"{KIND}:{RANK % count}"
    if KIND == "pretend":
        from pretend_accelerator.collectives import register

        register()
    {"train": train, "values": values, "library": library, "lost": lost}[sys.argv[1]](sys.argv[2])
