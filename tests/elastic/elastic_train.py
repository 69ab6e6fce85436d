"""A worker of the elastic tests: trains a small model, is killed where the test says so, and prints a digest.

Usage: elastic_train.py MODEL STEPS [FAULT ...] with FAULT = worker:step:place[:life], or worker:step:stop-SECONDS. With
REJOIN=N the lowest worker waits before step N and those after it until those that were killed want to join again.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections import deque
from typing import Any

import torch

import tfstyle_dist as tfd
from tfstyle_dist.checkpoint import files

PLACES = ("start", "forward", "backward", "step", "end")
SAMPLES = 39


@dataclasses.dataclass(slots=True)
class Meter:
    calls: int = 0
    last: torch.Tensor | None = None


class Joint(torch.nn.Module):
    """Calls everything that replicas can do together in a step; its replicas do not all do the same.

    It has a sparse gradient, a tensor whose memory is not in the order of its rows, and state that only some replicas
    change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 8, sparse=True)
        self.last = torch.nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(8))
        self.calls = self.first_calls = 0
        self.recent: deque[float] = deque(maxlen=3)
        self.meter, self.space = Meter(), types.SimpleNamespace(decayed=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        context = tfd.get_replica_context()
        hidden = self.table((x[:, :4].abs() * 3).long().clamp(0, 9)).mean(1)
        mean = context.all_reduce("MEAN", hidden.mean(0))
        if context.replica_id_in_sync_group == 0:
            self.first_calls += 1
        if context.replica_id_in_sync_group % 2:
            hidden = hidden * self.scale.mul_(1.01)
            self.recent.append(float(hidden.detach().sum()))
            self.meter.calls += 1
            self.meter.last = hidden.detach().sum()
            self.space.decayed *= 0.9
        everyone = context.all_gather(hidden, axis=0)
        turned = context.all_reduce("SUM", self.table.weight.detach().t() * (1 + self.first_calls / 7)).norm()
        merged = context.merge_call(
            lambda strategy, value: strategy.reduce("SUM", value, axis=None), args=(hidden.detach().sum(),)
        )
        own = self.meter.calls + self.space.decayed
        if self.meter.last is not None:
            own = own + self.meter.last
        return self.last(hidden + mean + everyone.mean(0) * own) + (merged + turned + sum(self.recent)) * 1e-3


def make_model(kind: str) -> torch.nn.Module:
    if kind in ("joint", "joint-tf"):
        return Joint()
    if kind == "cnn":
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Linear(4 * 36, 3),
        )  # fmt: skip
    if kind == "transformer":
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        return torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 3))
    wide = 1100 if kind == "wide" else 32  # replicas share the memory of gradients of more than 65,536 elements
    return torch.nn.Sequential(torch.nn.Linear(64, wide), torch.nn.ReLU(), torch.nn.Linear(wide, 3))


def make_optimizer(kind: str, model: torch.nn.Module, number: tfd.Variable) -> Any:
    rate = lambda: 0.05 * 0.5 ** (int(number) // 5)  # noqa: E731
    if kind == "joint-tf" or os.environ.get("OPTIMIZER") == "tf-momentum":
        return tfd.train.MomentumOptimizer(rate, 0.9)
    if os.environ.get("OPTIMIZER") == "tf-adam":
        return tfd.train.AdamOptimizer(0.01)
    if os.environ.get("OPTIMIZER") == "tf-wrapped":
        return tfd.train.Optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    if kind == "joint":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    if os.environ.get("OPTIMIZER", "SGD" if kind == "mlp" else "Adam") == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def shaped(kind: str, x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 1, 8, 8) if kind == "cnn" else x.view(-1, 4, 16) if kind == "transformer" else x


def digest(model: torch.nn.Module, optimizer: Any) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        if "running" in name or "num_batches" in name:
            continue
        found.update(value.contiguous().numpy().tobytes())
    state_dict = optimizer.state_dict()
    for state in state_dict["slots"] if "slots" in state_dict else state_dict["state"].values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()


def flip_a_bit(tensor: torch.Tensor, bit: int = 21) -> None:
    """In memory, behind everybody's back."""
    place = ctypes.c_uint8.from_address(tensor.data_ptr() + bit // 8)
    place.value ^= 1 << bit % 8


def apply_in_one_of_the_ways(optimizer: Any, pairs: list[Any], number: int) -> None:
    """All sum the same gradients."""
    context = tfd.get_replica_context()
    if number % 3 == 1:
        grads = context.all_reduce("SUM", [grad.to_dense() for grad, _ in pairs])
        summed = list(zip(grads, [variable for _, variable in pairs], strict=True))
        optimizer.apply_gradients(summed, skip_gradients_aggregation=True)
    elif number % 3 == 2 and isinstance(optimizer, tfd.train.AdamOptimizer):

        def merge(strategy: Any, given: list[Any]) -> None:
            optimizer.apply_gradients(given)

        context.merge_call(merge, args=(pairs,))
    else:
        optimizer.apply_gradients(pairs)


def update_together(strategy: Any, variable: tfd.Variable, loss: Any, buffer: Any) -> None:
    """In cross-replica context: a sum of what the replicas gave, and random numbers, into all copies."""
    summed = strategy.reduce("SUM", loss, axis=None) + strategy.reduce("MEAN", buffer, axis=None) + torch.rand(8)
    strategy.extended.update(variable, lambda copy, value: copy.assign_add(value), args=(summed,))


def wait_for_the_lost(strategy: Any, step: int) -> None:
    """The lowest worker waits until a worker that is missing wants to join, and has met all."""
    membership = strategy._elastic_steps.job.membership
    member, end = membership._member, time.monotonic() + 60
    if not strategy.is_chief or step < int(os.environ.get("REJOIN", "1000")):
        return
    while (
        len(member.epoch.members) < int(os.environ.get("WORKERS", "4"))
        and not member.admissible()
        and time.monotonic() < end
    ):
        time.sleep(0.01)


def main() -> None:
    kind, steps = sys.argv[1], int(sys.argv[2])
    life = int(os.environ.get("LIFE", "0"))
    faults = [[*text.split(":"), "0"][:4] for text in sys.argv[3:]]
    kills = {(int(w), int(s)): place for w, s, place, when in faults if int(when) == life}
    rank = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    if "THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["THREADS"].split(",")[rank]))
    elastic = tfd.experimental.Elastic(
        replicas=4,
        suspect_after=float(os.environ.get("SUSPECT", "30")),
        stopped_after=float(os.environ["STOPPED"]) if "STOPPED" in os.environ else None,
        check_every=int(os.environ["CHECK"]) if "CHECK" in os.environ else None,
    )
    strategy = tfd.MultiWorkerMirroredStrategy(elastic=elastic)
    torch.manual_seed(7 + rank)  # the lowest worker's values and seed count
    with strategy.scope():
        model = make_model(kind)
        seen = tfd.Variable(
            torch.zeros(SAMPLES),
            synchronization=tfd.VariableSynchronization.ON_READ,
            aggregation=tfd.VariableAggregation.SUM,
        )
        together = tfd.Variable(torch.zeros(()), aggregation=tfd.VariableAggregation.SUM)
        number = tfd.Variable(torch.zeros((), dtype=torch.int64))
        moved = tfd.Variable(torch.zeros(8), aggregation=tfd.VariableAggregation.SUM)
        optimizer = make_optimizer(kind, model, number)
    tf_style = isinstance(optimizer, tfd.train.TFOptimizer)
    schedule = None if tf_style else torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 64, generator=generator),
        torch.randint(0, 3, (SAMPLES,), generator=generator),
        torch.arange(SAMPLES),
    )
    dataset = strategy.experimental_distribute_dataset(data, global_batch_size=12, shuffle=True)

    def die(place: str) -> None:
        wanted = kills.get((rank, int(number)), "")
        if wanted == place == "flip":
            flip_a_bit(next(model.parameters()))
        elif wanted == place:
            os.kill(os.getpid(), signal.SIGKILL)
        if wanted.startswith("stop-") and place == "forward":
            del kills[rank, int(number)]
            subprocess.Popen(["sh", "-c", f"sleep {wanted[5:]}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    def train(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        die("start")
        if not tf_style:
            optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(shaped(kind, x)), y)
        die("forward")
        if tf_style:
            pairs = optimizer.compute_gradients(loss / 4)
            die("backward")
            apply_in_one_of_the_ways(optimizer, pairs, int(number))
        else:
            loss.backward()
            die("backward")
            optimizer.step()
        seen.assign_add(torch.bincount(index, minlength=SAMPLES).float())
        together.assign_add(y.float().sum())
        if kind.startswith("joint"):
            buffer = model.scale  # which some replicas alone have changed
            tfd.get_replica_context().merge_call(update_together, args=(moved, loss.detach() * 0.1, buffer))
        die("step")
        return loss

    losses, held = [], []
    manager, iterator = None, iter(dataset)
    if "CHECKPOINTS" in os.environ:
        publish = files.publish
        files.publish = lambda *args: die("save") or publish(*args)
        checkpoint = tfd.train.Checkpoint(
            model=model, optimizer=optimizer, seen=seen, together=together, number=number, iterator=iterator,
            **({} if tf_style else {"schedule": schedule}),
        )  # fmt: skip
        every = (
            {"step_counter": number, "checkpoint_interval": int(os.environ["EVERY"])} if "EVERY" in os.environ else {}
        )
        manager = tfd.train.CheckpointManager(checkpoint, os.environ["CHECKPOINTS"], max_to_keep=2, **every)
        if not every:
            manager.restore_or_initialize()
    joined = tfd.experimental.join(strategy, train, *([] if tf_style else [schedule]))
    first = int(number)
    while int(number) < steps:
        for batch in iterator:
            wait_for_the_lost(strategy, int(number))
            die("flip")
            if "ASK" in os.environ and strategy.should_stop(False):
                break
            per_replica = strategy.run(train, args=batch)
            held.append(strategy._elastic_steps.job.held)
            losses.append(float(strategy.reduce("MEAN", per_replica, axis=None)))
            die("end")
            if schedule is not None:
                schedule.step()
            number.assign_add(1)
            if manager is not None and int(number) % 3 == 0:
                manager.save()
            if int(number) == steps:
                break
        else:
            iterator = iter(dataset)
            if manager is not None:
                manager.checkpoint.iterator = iterator
    buffers = hashlib.sha256()
    strategy.sync_buffers()
    for buffer in model.buffers():
        buffers.update(buffer.numpy().tobytes())
    result = {
        "rank": rank,
        "life": life,
        "joined": joined,
        "saved": [] if manager is None else list(map(os.path.basename, manager.checkpoints)),
        "first": first,
        "weights": digest(model, optimizer),
        "losses": losses,
        "buffers": buffers.hexdigest(),
        "seen": [
            *seen.read_value().tolist(),
            float(together),
            *moved.read_value().tolist(),
            getattr(model, "calls", 0),
        ],
        "threads": torch.get_num_threads(),
        "retried": strategy._elastic_steps.job.retried,
        "held": held,
    }
    print("result " + json.dumps(result), flush=True)
    strategy.close()


if __name__ == "__main__":
    main()
