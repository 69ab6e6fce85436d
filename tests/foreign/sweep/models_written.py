"""Models as research code writes them: what they keep, and where, is out of the ordinary."""

from __future__ import annotations

import collections
import copy

import torch
from programs import WITHOUT_SERVERS, Net, case, plain, sgd
from steps_kept import fit
from torch import nn
from torch.nn import functional as F

OWN = {"reference": "ranks", "forms": ("replicas", "ranks", "central")}
"""Where each replica keeps its own: a rank has what one replica of a process must have."""


def own(run, model, optimizer, kept, extra=None):
    """Trains, and returns what each replica has kept."""
    fit(run, model, optimizer, extra)
    return {"weights": list(model.parameters()), "kept": run.each(kept)}


class _Tagged(Net):
    """Counts in an attribute of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.mean.calls, self.mean.last = 0, {"sum": 0.0}

    def forward(self, x):
        self.mean.lerp_(x.mean(0), 0.1)
        self.mean.calls += 1
        self.mean.last["sum"] = float(x.sum())
        return super().forward(x - self.mean) / (1 + 0.1 * self.mean.calls)


@case("models", "attributes-of-a-buffer", **OWN)
def attributes_of_a_buffer(run):
    with run.scope():
        model = _Tagged()
        optimizer = sgd(model)
    return own(run, model, optimizer, lambda: [model.mean, model.mean.calls, model.mean.last])


class _WithBest(nn.Module):
    """Keeps a frozen copy of the model that had the least loss."""

    def __init__(self):
        super().__init__()
        self.net, self.best, self.least = nn.Sequential(Net(), nn.BatchNorm1d(3)), None, float("inf")

    def forward(self, x):
        return self.net(x)

    def loss(self, x, y):
        found = F.mse_loss(self(x), y)
        self.last = found.item()
        return found

    def look(self, i):
        if self.last < self.least:
            self.least, self.best = self.last, copy.deepcopy(self.net).requires_grad_(False)


@case("models", "best-copy-of-a-step", **OWN)
def best_copy_of_a_step(run):
    with run.scope():
        model = _WithBest()
        optimizer = sgd(model)

    run.go(plain(run, model, optimizer, model.loss, model.look))
    return {"weights": list(model.net.parameters()), "kept": run.each(lambda: [model.best, model.least])}


class _Delegating(nn.Module):
    """Passes on what is read from it and what is set."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["module"], name)

    def __setattr__(self, name, value):
        if name in ("module", "training") or name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return self.module(x) / self.calls


@case("models", "wrapper-that-delegates-what-is-set", forms=WITHOUT_SERVERS)
def wrapper_that_delegates(run):
    with run.scope():
        model = _Delegating(Net())
        optimizer = sgd(model)
    return {**fit(run, model, optimizer), "calls": model.module.calls}


class _Node:
    def __init__(self, following):
        self.value, self.following = 0.0, following


class _Ring(Net):
    """Adds to the nodes of a ring, one after the other."""

    def __init__(self):
        super().__init__()
        last = _Node(None)
        self.at = last.following = _Node(_Node(last))

    def forward(self, x):
        self.at.value += float(x.sum())
        self.at = self.at.following
        return super().forward(x) + 0.01 * self.at.value

    def values(self):
        nodes = (self.at, self.at.following, self.at.following.following)
        return [node.value for node in nodes]


@case("models", "ring-of-nodes", **OWN)
def ring_of_nodes(run):
    with run.scope():
        model = _Ring()
        optimizer = sgd(model)
    return own(run, model, optimizer, model.values)


class _Equilibrium(nn.Module):
    """A fixed point whose gradient a hook of its output finds; it takes the hook away from within."""

    def __init__(self):
        super().__init__()
        self.cell, self.out, self.hook, self.solved = nn.Linear(6, 6), nn.Linear(6, 3), None, 0
        nn.init.uniform_(self.cell.weight, -0.1, 0.1)

    def forward(self, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(30):
                z = torch.tanh(self.cell(z) + x)
        z = torch.tanh(self.cell(z) + x)
        start = z.detach().requires_grad_()
        again = torch.tanh(self.cell(start) + x)

        def solve(gradient):
            self.hook.remove()
            self.hook, found = None, gradient
            for _ in range(30):
                found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + gradient
            self.solved += 1
            return found

        self.hook = z.register_hook(solve)
        return self.out(z)


@case("models", "equilibrium-with-a-hook", forms=WITHOUT_SERVERS)
def equilibrium(run):
    with run.scope():
        model = _Equilibrium()
        optimizer = sgd(model)
    return {**fit(run, model, optimizer), "solved": model.solved}


class _Merging(nn.Linear):
    """Low-rank weights that ``eval()`` merges into the others, and ``train()`` takes out again."""

    def __init__(self):
        super().__init__(6, 3)
        self.down, self.up = nn.Parameter(torch.full((2, 6), 0.1)), nn.Parameter(torch.full((3, 2), 0.1))
        self.merged, self.switched = False, 0
        self.weight.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.up.data @ self.down.data
            self.merged, self.switched = not mode, self.switched + 1
        return self

    def forward(self, x):
        found = super().forward(x)
        return found if self.merged else found + x @ self.down.T @ self.up.T


@case("models", "low-rank-weights-that-eval-merges", forms=WITHOUT_SERVERS)
def merging(run):
    with run.scope():
        model = _Merging()
        optimizer = sgd(model)

    def look(i):
        model.eval()
        model(run.x(i))
        model.train()

    return {**fit(run, model, optimizer, look), "switched": model.switched}


class _Codes(nn.Module):
    """Codes that follow what falls to them, begun with the first batch, and counted."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.used = nn.Linear(6, 2), nn.Linear(2, 3), collections.Counter()
        for name, value in (("codes", torch.eye(3)[:, :2]), ("sizes", torch.ones(3)), ("begun", torch.tensor(False))):
            self.register_buffer(name, value.clone())

    def forward(self, x):
        z = self.encoder(x)
        if not self.begun:
            self.codes.data.copy_(z[:3])
            self.begun.fill_(True)
        index = torch.cdist(z.detach(), self.codes).argmin(1)
        chosen = F.one_hot(index, 3).to(z)
        self.sizes.data.lerp_(chosen.sum(0), 0.1)
        self.codes.data.lerp_(chosen.T @ z.detach() / self.sizes[:, None], 0.1)
        self.used.update(index.tolist())
        return self.decoder(z + (F.embedding(index, self.codes) - z).detach())


@case("models", "codes-that-follow", **OWN)
def codes_that_follow(run):
    with run.scope():
        model = _Codes()
        optimizer = sgd(model)
    return own(run, model, optimizer, lambda: [model, [model.used[i] for i in range(3)]])


class _Odd(Net):
    """Equal to others of its class, false, and of no length."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __eq__(self, other):
        return isinstance(other, _Odd)

    def __hash__(self):
        return 1

    def __len__(self):
        return 0

    def __bool__(self):
        return False

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@case("models", "modules-that-are-equal", forms=WITHOUT_SERVERS)
def modules_that_are_equal(run):
    with run.scope():
        model = nn.ModuleList([_Odd(), _Odd(), nn.Linear(3, 6)])
        optimizer = sgd(model)

    run.go(plain(run, model, optimizer, lambda x, y: F.mse_loss(model[1](model[2](model[0](x))), y)))
    return {**run.result(model), "calls": [model[0].calls, model[1].calls]}
