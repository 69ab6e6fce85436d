"""Asynchronous training reaches the accuracy of synchronous training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from sklearn.datasets import load_digits

import tfstyle_dist as td

pytestmark = pytest.mark.timeout(280)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
STEPS, BATCH, TEST = 250, 128, 700
RATES = (0.2, 0.1, 0.05)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    return images[order], torch.tensor(digits.target)[order]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = data()
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(TEST, len(labels), (BATCH,), generator=generator)
        yield images[chosen], labels[chosen]


def train(net: Any, optimizer: Any, images: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()


def accuracy(net: Any) -> float:
    images, labels = data()
    with torch.no_grad():
        return float((net(images[:TEST]).argmax(1) == labels[:TEST]).float().mean())


def sgd(net: Any) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=RATES[0], weight_decay=3e-3)


def synchronous() -> float:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            net = model()
        optimizer, stream = sgd(net), batches(0)
        for step in range(STEPS * len(RATES)):
            optimizer.param_groups[0]["lr"] = RATES[step // STEPS]
            images, labels = next(stream)
            halves = list(zip(images.chunk(2), labels.chunk(2), strict=True))
            values = strategy.experimental_distribute_values_from_function(
                lambda context, halves=halves: halves[context.replica_id_in_sync_group]
            )
            strategy.run(lambda pair: train(net, optimizer, *pair), args=(values,))
        return accuracy(net)


def asynchronous(c: Any) -> float:
    with c.strategy.scope():
        net = model()
    optimizer = sgd(net)
    iterator = iter(
        c.coordinator.create_per_worker_dataset(lambda: batches(td.coordinator.experimental_get_current_worker_index()))
    )

    def step(iterator: Any) -> None:
        train(net, optimizer, *next(iterator))

    c.await_workers()
    for rate in RATES:
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(STEPS):
            c.coordinator.schedule(step, args=(iterator,))
        c.coordinator.join(timeout=100)
    return accuracy(net)


def test_digits_reach_the_accuracy_of_mirrored_strategy(cluster: Any) -> None:
    expected = synchronous()
    assert expected > 0.94
    for workers in (2, 4):
        assert asynchronous(cluster(workers=workers, ps=2)) == pytest.approx(expected, abs=0.01)
