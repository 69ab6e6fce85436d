"""Trains a small network on handwritten digits with parameter servers: one file for every role.

    python -m tfstyle_dist.launch --workers 2 --ps 1 examples/parameter_server.py
    python -m tfstyle_dist.launch --workers 4 --ps 2 --evaluator examples/parameter_server.py --directory /tmp/digits
    TF_CONFIG='{"cluster": ..., "task": ...}' python examples/parameter_server.py      # one task of a real cluster
    python examples/parameter_server.py                                                # the first line

The chief schedules steps and shows steps per second, staleness (how many updates of others came while a step ran) and
the length of the queue. Workers do not wait for each other, so every run differs a little. With ``--directory`` the
servers write a checkpoint of model and optimizer now and then, a job that was cut off goes on from the newest one, and
an evaluator task measures each while the training goes on. The exit code is 1 when the test accuracy is below 94 %.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import tfstyle_dist as tfd

NUM_TEST = 357


def load_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[NUM_TEST:], order[:NUM_TEST]
    return images[train], labels[train], images[test], labels[test]


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    # Runs on each worker, which has the whole data; its number makes its order its own.
    images, labels, _, _ = load_data()
    generator = torch.Generator().manual_seed(tfd.coordinator.experimental_get_current_worker_index())
    while True:
        chosen = torch.randint(len(labels), (64,), generator=generator)
        yield images[chosen], labels[chosen]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy_of(model: nn.Module) -> float:
    _, _, images, labels = load_data()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def train(resolver: tfd.cluster_resolver.ClusterResolver, steps: int, directory: Path | None) -> float:
    strategy = tfd.ParameterServerStrategy(resolver)
    coordinator = tfd.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = make_model()  # its parameters move to the servers
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)  # its state lives there too

    def step(iterator: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        images, labels = next(iterator)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()  # sends the gradients; the servers update
        return loss

    checkpoint = tfd.train.Checkpoint(model=model, optimizer=optimizer, step=0)
    manager = None if directory is None else tfd.train.CheckpointManager(checkpoint, directory, max_to_keep=5)
    if manager is not None:
        manager.restore_or_initialize()
    begin = checkpoint.step

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    with tqdm(total=steps, initial=begin, unit="step") as bar:
        while checkpoint.step < steps:
            count = min(100, steps - checkpoint.step)
            losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(count)]
            while not coordinator.done():  # training goes on; here one may watch or stop it
                now = coordinator.statistics()
                bar.update(begin + now.finished - bar.n)
                bar.set_postfix(staleness=f"{now.staleness:.1f}", queue=now.waiting)
                time.sleep(0.05)
            checkpoint.step += count
            bar.update(checkpoint.step - bar.n)
            staleness = coordinator.statistics().staleness
            bar.set_postfix(staleness=f"{staleness:.1f}", queue=0, loss=f"{losses[-1].fetch():.3f}")
            if manager is not None:
                manager.save(checkpoint_number=checkpoint.step)  # each server writes its part
    accuracy = accuracy_of(model)  # reading the model here pulls it from the servers
    strategy.close()  # the workers and servers end
    return accuracy


def evaluate(steps: int, directory: Path) -> None:
    """The evaluator's task: measures each new checkpoint, with a plain model, until it has seen the last one."""
    checkpoint = tfd.train.Checkpoint(model=make_model(), step=0)
    for path in tfd.train.checkpoints_iterator(directory):
        checkpoint.restore(path).expect_partial()  # the optimizer's state is not needed here
        print(f"step {checkpoint.step}: test accuracy {accuracy_of(checkpoint.model):.3f}", flush=True)
        if checkpoint.step >= steps:
            break


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--directory", type=Path, help="a folder for checkpoints, which an evaluator measures")
    options = parser.parse_args()
    resolver = tfd.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        tfd.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
    elif resolver.task_type == "evaluator":
        if options.directory is None:
            parser.error("an evaluator needs --directory")
        evaluate(options.steps, options.directory)
    elif resolver.task_type is None:  # no TF_CONFIG
        launch = [sys.executable, "-m", "tfstyle_dist.launch", "--workers", "2", "--ps", "1", __file__]
        return subprocess.call([*launch, *sys.argv[1:]])
    else:
        start = time.perf_counter()
        accuracy = train(resolver, options.steps, options.directory)
        print(f"test accuracy {accuracy:.3f} after {options.steps} steps, {time.perf_counter() - start:.1f} s")
        return 0 if accuracy >= 0.94 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
