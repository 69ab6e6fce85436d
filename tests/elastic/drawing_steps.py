"""A worker whose samples and steps draw from torch, Python and numpy; worker 1 is killed in a step and comes back.

Usage: drawing_steps.py SAMPLER KILLED: "shuffled", "weighted", "in order" or "stream", perhaps with " by processes";
the step of the kill or -1.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator

import numpy as np
import torch
from elastic_train import wait_for_the_lost

import tfstyle_dist as tfd

SAMPLER, KILLED = sys.argv[1], int(sys.argv[2])


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Draws for each sample."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(3) + index * random.random() + float(np.random.rand())


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """The same samples, without indices."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(Noisy().__getitem__, range(12))  # each of two processes


def loader() -> torch.utils.data.DataLoader[torch.Tensor]:
    torch.manual_seed(3)
    if SAMPLER == "weighted":
        sampler = torch.utils.data.WeightedRandomSampler(torch.arange(1.0, 25.0).tolist(), 24)
        return torch.utils.data.DataLoader(Noisy(), 8, sampler=sampler)
    processes = 2 if SAMPLER.endswith(" by processes") else 0
    if SAMPLER.startswith("stream"):
        return torch.utils.data.DataLoader(Stream(), 4, num_workers=processes)
    return torch.utils.data.DataLoader(Noisy(), 8, shuffle=not SAMPLER.startswith("in order"), num_workers=processes)


def main() -> None:
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=4, suspect_after=30))
    strategy.seed_replicas(7, python=True)
    with strategy.scope():
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        epoch, number = tfd.Variable(0), tfd.Variable(0)
    batches = strategy.experimental_distribute_dataset(loader())

    def step(x: torch.Tensor) -> torch.Tensor:
        factor = np.random.beta(0.4, 0.4)
        optimizer.zero_grad()
        loss = (model(x) * factor + random.random()).square().mean()
        loss.backward()
        if (index, int(number), os.environ["LIFE"]) == (1, KILLED, "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        model.weight.grad += np.random.normal() * 0 + tfd.get_replica_context().all_reduce("SUM", torch.tensor(factor))
        optimizer.step()
        return loss.detach()

    joined = tfd.experimental.join(strategy, step)
    while int(epoch) < 3:
        for x in batches:
            wait_for_the_lost(strategy, int(number))
            loss = strategy.reduce("MEAN", strategy.run(step, args=(x,)), axis=None)
            number.assign_add(1)
        epoch.assign_add(1)
    result = [float(loss), model.weight.tolist(), random.random(), float(np.random.rand()), joined]
    print("result " + json.dumps(result), flush=True)
    strategy.close()


if __name__ == "__main__":
    main()
