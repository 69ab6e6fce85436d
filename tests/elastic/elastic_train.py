"""A worker of the elastic tests: trains a small model, is killed where the test says so, and prints a digest.

Usage: elastic_train.py MODEL STEPS [FAULT ...] with FAULT = worker:step:place, or worker:step:stop-SECONDS.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

import torch

import tfstyle_dist as tfd

PLACES = ("start", "forward", "backward", "step", "end")


class Joint(torch.nn.Module):
    """Calls everything that replicas can do together in a step, and has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 8, sparse=True)
        self.last = torch.nn.Linear(8, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        context = tfd.get_replica_context()
        hidden = self.table((x[:, :4].abs() * 3).long().clamp(0, 9)).mean(1)
        mean = context.all_reduce("MEAN", hidden.mean(0))
        everyone = context.all_gather(hidden, axis=0)
        merged = context.merge_call(
            lambda strategy, value: strategy.reduce("SUM", value, axis=None), args=(hidden.detach().sum(),)
        )
        return self.last(hidden + mean + everyone.mean(0)) + merged * 1e-3


def make_model(kind: str) -> torch.nn.Module:
    if kind == "joint":
        return Joint()
    if kind == "cnn":
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Linear(4 * 36, 3),
        )  # fmt: skip
    if kind == "transformer":
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        return torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 3))
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))


def make_optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "joint":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    if kind == "mlp":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def shaped(kind: str, x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 1, 8, 8) if kind == "cnn" else x.view(-1, 4, 16) if kind == "transformer" else x


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        if "running" in name or "num_batches" in name:
            continue
        found.update(value.contiguous().numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    kind, steps = sys.argv[1], int(sys.argv[2])
    kills = {(int(w), int(s)): place for w, s, place in (text.split(":") for text in sys.argv[3:])}
    rank = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    torch.manual_seed(7 + rank)  # the lowest worker's values and seed count
    elastic = tfd.experimental.Elastic(replicas=4, min_workers=1, suspect_after=float(os.environ.get("SUSPECT", "30")))
    strategy = tfd.MultiWorkerMirroredStrategy(elastic=elastic)
    with strategy.scope():
        model = make_model(kind)
        optimizer = make_optimizer(kind, model)
        seen = tfd.Variable(
            torch.zeros(6), synchronization=tfd.VariableSynchronization.ON_READ, aggregation=tfd.VariableAggregation.SUM
        )
        together = tfd.Variable(torch.zeros(()), aggregation=tfd.VariableAggregation.SUM)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(
        torch.randn(39, 64, generator=generator), torch.randint(0, 3, (39,), generator=generator)
    )
    dataset = strategy.experimental_distribute_dataset(data, global_batch_size=12, shuffle=True)
    state: dict[str, Any] = {"step": 0}

    def die(place: str) -> None:
        wanted = kills.get((rank, state["step"]), "")
        if wanted == place:
            os.kill(os.getpid(), signal.SIGKILL)
        if wanted.startswith("stop-") and place == "forward":
            del kills[rank, state["step"]]
            subprocess.Popen(["sh", "-c", f"sleep {wanted[5:]}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        die("start")
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(shaped(kind, x)), y)
        die("forward")
        loss.backward()
        die("backward")
        optimizer.step()
        seen.assign_add(torch.bincount(y, minlength=6).float())
        together.assign_add(y.float().sum())
        die("step")
        return loss

    losses = []
    while state["step"] < steps:
        for x, y in dataset:
            per_replica = strategy.run(train, args=(x, y))
            losses.append(float(strategy.reduce("MEAN", per_replica, axis=None)))
            die("end")
            schedule.step()
            state["step"] += 1
            if state["step"] == steps:
                break
    buffers = hashlib.sha256()
    strategy.sync_buffers()
    for buffer in model.buffers():
        buffers.update(buffer.numpy().tobytes())
    result = {
        "rank": rank,
        "weights": digest(model, optimizer),
        "losses": losses,
        "buffers": buffers.hexdigest(),
        "seen": [*seen.read_value().tolist(), float(together), getattr(model, "calls", 0)],
        "retried": strategy._elastic_steps.job.retried,
        "held": strategy._elastic_steps.job.held,
    }
    print("result " + json.dumps(result), flush=True)
    strategy.close()


if __name__ == "__main__":
    main()
