"""A program of Lightning Fabric; ``test_fabric.py`` starts it in many ways. Only the line that makes Fabric varies."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 16


def fabric_for(kind: str, devices: int) -> Fabric:
    if kind == "stock":
        return Fabric(accelerator="cpu", devices=devices)
    import tfstyle_dist as tfd
    from tfstyle_dist.integrations.fabric import TfdFabricStrategy

    if kind == "name":
        return Fabric(accelerator="cpu", devices=devices, strategy="tfd_mirrored")
    if kind == "spawn":
        return Fabric(accelerator="cpu", devices=devices, strategy=TfdFabricStrategy(start_method="spawn"))
    if kind == "tree":
        ops = tfd.ReductionToOneDevice(aggregation_method=tfd.AggregationMethod.EXPERIMENTAL_TREE)
        return Fabric(accelerator="cpu", devices=devices, strategy=TfdFabricStrategy(cross_device_ops=ops))
    if kind == "given":
        strategy = tfd.MultiWorkerMirroredStrategy(devices=["cpu:0"])
        return Fabric(accelerator="cpu", devices=devices, strategy=TfdFabricStrategy(strategy))
    return Fabric(accelerator="cpu", devices=devices, strategy=TfdFabricStrategy())


def train(fabric: Fabric, folder: str, lost: int = -1) -> None:
    fabric.seed_everything(1, verbose=False)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    x = torch.randn(64, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=GLOBAL_BATCH // fabric.world_size))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    losses = []
    for epoch in range(3):
        for number, (inputs, targets) in enumerate(loader):
            if epoch == 1 and number == 2 and fabric.global_rank == lost:
                sys.stdout.flush()
                sys.exit(7)
            halfway = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=halfway):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                fabric.backward(loss / 2)
            if not halfway:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean"))
        scheduler.step()
        if epoch == 0:
            fabric.save(Path(folder) / "middle.ckpt", state | {"epoch": epoch})
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            fabric.load(Path(folder) / "middle.ckpt", state)
            assert state["epoch"] == 0
    fabric.barrier()
    fabric.save(Path(folder) / "last.ckpt", state | {"losses": torch.stack(losses)})
    assert fabric.broadcast(fabric.global_rank + 5, src=0) == 5
    ranks = torch.atleast_1d(fabric.all_gather(torch.tensor(fabric.global_rank))).tolist()
    content = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    with open(Path(folder) / f"rank{fabric.global_rank}", "w") as file:
        file.write(f"{ranks} {hashlib.sha256(content).hexdigest()}")


def sums(fabric: Fabric, folder: str) -> None:
    """On three processes: 1e8, 1 and -1e8, whose sum depends on the order; half precision; what is Fabric's own."""
    rank = fabric.global_rank
    values = (1e8, 1.0, -1e8)
    given = torch.full((70_000,), values[rank])
    assert fabric.all_reduce(given, reduce_op="sum") is given
    assert given.unique().tolist() == [0.0], "each number is 1e8, then 1, then -1e8"
    half = torch.full((3,), (256.0, 1.0, 1.0)[rank], dtype=torch.bfloat16)
    assert fabric.all_reduce({"half": half})["half"].unique().tolist() == [86.0], "added in float32: 258 / 3"
    assert fabric.all_reduce(torch.tensor([rank, 5])).tolist() == [1, 5]
    assert fabric.all_reduce(torch.tensor([rank]), reduce_op="max").tolist() == [2]
    assert fabric.all_reduce(torch.tensor([1.0]), reduce_op=torch.distributed.ReduceOp.SUM).tolist() == [3.0]
    pair = torch.distributed.new_group([0, 1])
    if rank < 2:
        assert fabric.all_reduce(torch.tensor([rank + 1.0]), group=pair, reduce_op="sum").tolist() == [3.0]
    model = fabric.setup(torch.nn.Linear(40_000, 1, bias=False))
    fabric.backward(model(torch.full((1, 40_000), values[rank])).sum())
    assert model.weight.grad.unique().tolist() == [0.0], "in the same order"
    strategy = fabric.strategy.strategy
    with strategy.scope():
        owned = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="'weight', were made in the scope"):
        fabric.setup(owned)
    fabric.launch()  # once more: nothing changes
    assert fabric.strategy.strategy is strategy
    fabric.strategy.teardown()
    assert strategy.closed
    Path(folder, f"rank{rank}").write_text("agrees")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--kind", default="tfd")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--lost", type=int, default=-1)
    parser.add_argument("--sums", action="store_true")
    options = parser.parse_args()
    fabric = fabric_for(options.kind, options.processes)
    if options.sums:
        fabric.launch()
        sums(fabric, options.folder)
    elif "LT_CLI_USED" in os.environ:
        train(fabric, options.folder)
    else:
        fabric.launch(train, options.folder, options.lost)


if __name__ == "__main__":
    main()
