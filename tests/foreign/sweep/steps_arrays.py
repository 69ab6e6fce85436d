"""Steps that keep what they count in numpy arrays of helpers, trainers and modules."""

from __future__ import annotations

import numpy as np
import torch
from programs import ALONE, Net, case, plain, sgd
from steps_states import OF_SHARES, rated
from torch.nn import functional as F


class _RunningMeanStd:
    def __init__(self, size):
        self.mean, self.var, self.count = np.zeros(size), np.ones(size), 1e-4

    def update(self, x):
        mean, var, count = x.mean(0), x.var(0), len(x)
        delta, total = mean - self.mean, self.count + count
        self.mean += delta * count / total
        self.var = (self.var * self.count + var * count + delta**2 * self.count * count / total) / total
        self.count = total

    def normalized(self, x):
        return torch.from_numpy((x - self.mean) / np.sqrt(self.var + 1e-8))


@case("steps", "running-mean-in-arrays-of-a-helper", **OF_SHARES)
def running_mean(run):
    with run.scope():
        model = Net()
        optimizer, stats = sgd(model), _RunningMeanStd(6)

    def step(i):
        x, y = run.xy(i)
        stats.update(x.numpy())
        optimizer.zero_grad()
        F.mse_loss(model(stats.normalized(x.numpy())), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model, stats=run.each(lambda: torch.from_numpy(np.stack([stats.mean, stats.var]))))


@case("steps", "array-of-a-module-written-in-place", **OF_SHARES)
def array_of_a_module(run):
    class Shifted(Net):
        def __init__(self):
            super().__init__()
            self.shift = np.zeros(6)

        def forward(self, x):
            self.shift *= 0.9
            self.shift += 0.1 * x.detach().numpy().mean(0)
            return super().forward(x - torch.from_numpy(self.shift))

    with run.scope():
        model = Shifted()
        optimizer = sgd(model)

    step = plain(run, model, optimizer)
    run.go(step, 3)
    model.shift[:] = 0.5
    run.go(step, 3)
    return run.result(model, shifts=run.each(lambda: torch.from_numpy(model.shift)))


@case("steps", "array-of-a-trainer-counts", forms=ALONE)
def array_of_a_trainer(run):
    class Trainer:
        def __init__(self):
            self.model = Net()
            self.optimizer, self.counts = sgd(self.model), np.zeros(3, dtype=np.int64)

        def step(self, i):
            x, y = run.xy(i)
            self.counts[i % 3] += 1
            self.optimizer.zero_grad()
            (F.mse_loss(self.model(x), y) / int(self.counts.sum())).backward()
            self.optimizer.step()

    with run.scope():
        trainer = Trainer()
    run.go(trainer.step)
    return run.result(trainer.model, counts=torch.from_numpy(trainer.counts.copy()))


@case("steps", "bandit-with-a-generator-of-numpy", forms=ALONE)
def bandit(run):
    class Bandit:
        def __init__(self):
            self.rng, self.counts, self.values = np.random.default_rng(0), np.zeros(3), np.zeros(3)

        def arm(self):
            return int(self.rng.integers(3)) if self.rng.random() < 0.5 else int(self.values.argmax())

        def tell(self, arm, reward):
            self.counts[arm] += 1
            self.values[arm] += (reward - self.values[arm]) / self.counts[arm]

    with run.scope():
        model = Net()
        optimizer, bandit = sgd(model), Bandit()

    def step(i):
        x, y = run.xy(i)
        arm = bandit.arm()
        rated(optimizer, (0.05, 0.1, 0.2)[arm])
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        bandit.tell(arm, float(i % 4) - 0.1 * arm)

    run.go(step, 12)
    return run.result(model, values=torch.from_numpy(bandit.values.copy()))


class _Replay:
    """A ring of examples with its place; all that is stored is found again."""

    def __init__(self, size):
        self.data, self.at, self.full = np.zeros((size, 6)), 0, 0

    def add(self, rows):
        for row in rows:
            self.data[self.at] = row
            self.at, self.full = (self.at + 1) % len(self.data), min(self.full + 1, len(self.data))

    def mean(self):
        return torch.from_numpy(self.data[: self.full].mean(0))


@case("steps", "ring-of-examples-of-a-process", **OF_SHARES)
def small_ring(run):
    with run.scope():
        model = Net()
        optimizer, ring = sgd(model), _Replay(64)

    def step(i):
        x, y = run.xy(i)
        ring.add(x.numpy())
        optimizer.zero_grad()
        F.mse_loss(model(x - ring.mean()), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model, full=ring.full)


@case("steps", "long-ring-of-examples-loses-none", forms=ALONE)
def long_ring(run):
    with run.scope():
        model = Net()
        optimizer, ring = sgd(model), _Replay(4000)

    def step(i):
        x, y = run.xy(i)
        ring.add(x.numpy())
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    run.go(step)
    empty = int((ring.data[: ring.full] == 0).all(1).sum())
    return run.result(model, empty=empty)
