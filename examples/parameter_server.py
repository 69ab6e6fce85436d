"""Trains a small network on handwritten digits with parameter servers: one file for every role.

    python examples/parameter_server.py                           # this machine: 2 workers and 1 server of its own
    python examples/parameter_server.py --workers 4 --ps 2
    TF_CONFIG='{"cluster": ..., "task": ...}' python examples/parameter_server.py      # one task of a real cluster

Without TF_CONFIG the program starts the other tasks itself, as processes of this machine. The workers do not wait for
each other, so every run differs a little. The exit code is 1 when the test accuracy is below 94 %.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

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


def train(resolver: tfd.cluster_resolver.ClusterResolver, steps: int) -> float:
    strategy = tfd.ParameterServerStrategy(resolver)
    coordinator = tfd.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(iterator: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        def replica(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()  # sends the gradients; the servers update
            return loss

        return strategy.run(replica, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    _, _, images, labels = load_data()
    accuracy = 0.0
    with tqdm(total=steps, unit="step") as bar:
        while bar.n < steps:
            losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(min(100, steps - bar.n))]
            coordinator.join()
            with torch.no_grad():  # reading the model here pulls it from the servers
                accuracy = (model(images).argmax(1) == labels).float().mean().item()
            bar.update(len(losses))
            bar.set_postfix(loss=f"{losses[-1].fetch():.3f}", accuracy=f"{accuracy:.3f}")
    strategy.close()  # the workers and servers end
    return accuracy


def start_tasks(workers: int, ps: int) -> tuple[dict[str, list[str]], list[subprocess.Popen[bytes]]]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers + ps)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    cluster = {"worker": addresses[:workers], "ps": addresses[workers:], "chief": ["127.0.0.1:0"]}
    tasks = []
    for job in ("ps", "worker"):
        for index in range(len(cluster[job])):
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            command = [sys.executable, __file__]
            tasks.append(subprocess.Popen(command, env={**os.environ, "TF_CONFIG": config, "OMP_NUM_THREADS": "1"}))
    return cluster, tasks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="workers to start when there is no TF_CONFIG")
    parser.add_argument("--ps", type=int, default=1, help="servers to start when there is no TF_CONFIG")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    resolver = tfd.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        tfd.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return 0
    tasks: list[subprocess.Popen[bytes]] = []
    if "TF_CONFIG" not in os.environ:
        cluster, tasks = start_tasks(options.workers, options.ps)
        spec = tfd.cluster_resolver.ClusterSpec(cluster)
        resolver = tfd.cluster_resolver.SimpleClusterResolver(spec, task_type="chief", task_id=0)
    start = time.perf_counter()
    try:
        accuracy = train(resolver, options.steps)
        for task in tasks:
            task.wait(30)
    finally:
        for task in tasks:
            task.kill()
    print(f"test accuracy {accuracy:.3f} after {options.steps} steps, {time.perf_counter() - start:.1f} s")
    return 0 if accuracy >= 0.94 else 1


if __name__ == "__main__":
    sys.exit(main())
