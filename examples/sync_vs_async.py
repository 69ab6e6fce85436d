"""One model, trained in step and out of step: accuracy and time side by side.

    python examples/sync_vs_async.py                       # digits, 2 workers
    python examples/sync_vs_async.py --workers 4 --examples 100000 --slow 0.02

Three forms see the same number of examples, in batches of 64: one worker; several workers in step
(MultiWorkerMirroredStrategy: their gradients are averaged, so each step takes several batches); several workers out of
step (ParameterServerStrategy: each batch is a step of its own, with parameters that others may have changed since).
``--slow`` makes the last worker wait so many seconds in each step: in step, all wait for it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import tfstyle_dist as tfd

BATCH, NUM_TEST = 64, 357
FORMS = ("one worker", "in step", "out of step")


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.images, dtype=torch.float32).flatten(1)[order] / 16, torch.tensor(digits.target)[order]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Batches:
    """Endless random batches; each worker draws its own."""

    def __init__(self, worker: int, slow: float, device: torch.device | str = "cpu") -> None:
        images, labels = (t.to(device) for t in load_data())
        self._images, self._labels, self._slow = images[NUM_TEST:], labels[NUM_TEST:], slow
        self._generator = torch.Generator().manual_seed(worker)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._slow)
        chosen = torch.randint(len(self._labels), (BATCH,), generator=self._generator)
        return self._images[chosen], self._labels[chosen]


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The same step for all forms."""

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def accuracy_of(model: nn.Sequential) -> float:
    images, labels = (t.to(model[0].weight.device) for t in load_data())
    with torch.no_grad():
        return (model(images[:NUM_TEST]).argmax(1) == labels[:NUM_TEST]).float().mean().item()


def in_step(batches: int, slow: float) -> dict[str, Any] | None:
    strategy = tfd.MultiWorkerMirroredStrategy()
    workers = strategy.num_replicas_in_sync
    with strategy.scope():
        model = make_model()
    step = make_step(model, torch.optim.Adam(model.parameters(), lr=2e-3))
    index = strategy.cluster_resolver.task_id
    data, count = Batches(index, slow if index == workers - 1 else 0.0, model[0].weight.device), batches // workers
    start = time.perf_counter()
    for _ in range(count):
        strategy.run(step, args=next(data))
    seconds, accuracy = time.perf_counter() - start, accuracy_of(model)
    return {"steps": count, "seconds": seconds, "accuracy": accuracy, "staleness": 0.0} if index == 0 else None


def out_of_step(resolver: Any, batches: int, slow: float) -> dict[str, Any]:
    strategy = tfd.ParameterServerStrategy(resolver)
    coordinator = tfd.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = make_model()
    step = make_step(model, torch.optim.Adam(model.parameters(), lr=2e-3))
    last = len(strategy.cluster["worker"]) - 1

    def dataset() -> Batches:
        index = tfd.coordinator.experimental_get_current_worker_index()
        return Batches(index, slow if index == last else 0.0)

    def closure(iterator: Any) -> None:
        step(*next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    start = time.perf_counter()
    for _ in range(batches):
        coordinator.schedule(closure, args=(iterator,))
    coordinator.join()
    seconds, accuracy = time.perf_counter() - start, accuracy_of(model)
    result = {"steps": batches, "seconds": seconds, "accuracy": accuracy}
    result["staleness"] = coordinator.statistics().staleness
    strategy.close()
    return result


def launch(form: str, options: argparse.Namespace) -> dict[str, Any]:
    tasks = ["--workers", str(1 if form == "one worker" else options.workers)]
    tasks += ["--ps", "1"] if form == "out of step" else []
    arguments = ["--examples", str(options.examples), "--slow", str(0.0 if form == "one worker" else options.slow)]
    command = [sys.executable, "-m", "tfstyle_dist.launch", *tasks, __file__, *arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output[output.index("{") : output.index("}") + 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--examples", type=int, default=64_000)
    parser.add_argument("--slow", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    resolver = tfd.cluster_resolver.TFConfigClusterResolver()
    batches, cluster = options.examples // BATCH, resolver.cluster_spec().as_dict()
    if not cluster:  # no TF_CONFIG: this is the program that the user started
        print(f"{'form':12} {'steps':>6} {'seconds':>8} {'accuracy':>9} {'staleness':>10}")
        for form in FORMS:
            r = launch(form, options)
            print(f"{form:12} {r['steps']:6} {r['seconds']:8.2f} {r['accuracy']:9.3f} {r['staleness']:10.2f}")
    elif resolver.task_type in ("worker", "ps") and "ps" in cluster:
        tfd.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
    else:
        result = out_of_step(resolver, batches, options.slow) if "ps" in cluster else in_step(batches, options.slow)
        if result is not None:
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
