"""Steps that average, prune and adapt weights, and distil."""

from __future__ import annotations

import collections
import copy

import torch
from programs import STEPS, Net, case, random, sgd
from steps_kept import fit
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

# ---- what averages, consolidates, adapts --------------------------------------------------------------------------


@case("steps", "latest-weights-averaged")
def lawa(run):
    class Lawa:
        def __init__(self, model):
            self.model, self.kept = model, collections.deque(maxlen=3)

        def update(self):
            self.kept.append({k: v.detach().clone() for k, v in self.model.state_dict().items()})

        def average(self):
            return {k: torch.stack([kept[k] for kept in self.kept]).mean(0) for k in self.kept[0]}

    with run.scope():
        model = Net()
        optimizer, lawa = sgd(model), Lawa(model)
    found = fit(run, model, optimizer, lambda i: lawa.update())
    return {**found, "average": lawa.average(), "averages": run.each(lawa.average)}


@case("steps", "synaptic-intelligence")
def synaptic(run):
    class Importance:
        def __init__(self, model):
            self.model, self.w = model, {n: torch.zeros_like(p) for n, p in model.named_parameters()}
            self.old = {n: p.detach().clone() for n, p in model.named_parameters()}

        def penalty(self):
            return sum((self.w[n] * (p - self.old[n]) ** 2).sum() for n, p in self.model.named_parameters())

        def update(self):
            for n, p in self.model.named_parameters():
                self.w[n] += p.grad.abs()

    with run.scope():
        model = Net()
        optimizer, importance = sgd(model, 0.02), Importance(model)

    def loss(x, y):
        return F.mse_loss(model(x), y) + importance.penalty()

    return fit(run, model, optimizer, lambda i: importance.update(), loss)


@case("steps", "lora-merged-and-unmerged")
def lora(run):
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.merged = nn.Linear(6, 3), False
            self.a.weight.requires_grad_(False)
            self.down, self.up = nn.Parameter(random(1, 2, 6)), nn.Parameter(torch.zeros(3, 2))

        def forward(self, x):
            return self.a(x) if self.merged else self.a(x) + x @ self.down.T @ self.up.T

        def train(self, mode=True):
            if mode == self.merged:
                self.a.weight.data.add_(self.up @ self.down, alpha=-1.0 if mode else 1.0)
                self.merged = not mode
            return super().train(mode)

    with run.scope():
        model = Lora()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def evaluated(i):
        model.eval()
        with torch.no_grad():
            model(run.x(i))
        model.train()

    found = fit(run, model, optimizer, evaluated)
    model.eval()
    return {**found, "merged": list(model.parameters())}


@case("steps", "pruned-again-and-again")
def pruned(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    for i in range(STEPS):
        run.run(step, i)
        if i == 2:
            prune.l1_unstructured(model.a, "weight", amount=0.3)
            optimizer = sgd(model)
    prune.remove(model.a, "weight")
    return run.result(model)


@case("steps", "pruned-between-runs-more-each-time")
def pruned_more(run):
    with run.scope():
        model = Net()
        prune.identity(model.a, "weight")
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    for i in range(STEPS):
        run.run(step, i)
        prune.global_unstructured([(model.a, "weight")], prune.L1Unstructured, amount=0.1)
    return run.result(model)


@case("steps", "teacher-centre")
def dino(run):
    with run.scope():
        student, head = Net(), nn.Linear(3, 4)
        teacher = copy.deepcopy(student).requires_grad_(False)
        student.register_buffer("centre", torch.zeros(3))
        optimizer = torch.optim.AdamW([*student.parameters(), *head.parameters()], lr=0.01)

    def step(i):
        x = run.x(i)
        with torch.no_grad():
            wanted = teacher(x)
            student.centre = 0.9 * student.centre + 0.1 * run.mean(wanted.mean(0))
        loss = -(F.softmax(wanted - student.centre, -1) * F.log_softmax(student(x + 0.1), -1)).sum(-1).mean()
        loss = loss + head(student(x)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
                p.mul_(0.9).add_(q.detach(), alpha=0.1)

    run.go(step)
    return run.result(student, teacher, head)
