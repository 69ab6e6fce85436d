"""Steps as published code makes them: optimizers that look past their groups, models that change in the step."""

from __future__ import annotations

import copy
from collections import deque

import torch
from programs import WITHOUT_SERVERS, Net, case, random, sgd
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def fit(run, model, optimizer, before=None, count=6):
    """Steps of a model, and what ``before`` does with the gradients."""

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if before:
            before(i)
        optimizer.step()

    run.go(step, count)
    return run.result(model)


# ---- optimizers whose step finds the parameters elsewhere ---------------------------------------------------------

NOT_OF_THE_GROUPS = {"central": r"or a hook of it, changes parameters that it does not take from param_groups"}


class _QuasiNewton(torch.optim.Optimizer):
    """The pairs of L-BFGS with a fixed rate; keeps the list of its parameters, as ``torch.optim.LBFGS`` does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.2})
        self.pairs, self.kept, self.last = deque(maxlen=3), self.param_groups[0]["params"], None

    @torch.no_grad()
    def step(self, closure=None):
        now = parameters_to_vector(self.kept)
        gradient = parameters_to_vector([p.grad for p in self.kept])
        if self.last is not None:
            moved, turned = now - self.last[0], gradient - self.last[1]
            if moved @ turned > 1e-10:
                self.pairs.append((moved, turned))
        direction, factors = gradient.clone(), []
        for moved, turned in reversed(self.pairs):
            factors.append((moved @ direction) / (moved @ turned))
            direction = direction - factors[-1] * turned
        for (moved, turned), factor in zip(self.pairs, reversed(factors), strict=True):
            direction = direction + moved * (factor - (turned @ direction) / (moved @ turned))
        self.last, start = (now, gradient), 0
        for p in self.kept:
            p.add_(direction[start : start + p.numel()].view_as(p), alpha=-0.2)
            start += p.numel()


@case("steps", "optimizer-with-a-list-of-its-parameters", refused=NOT_OF_THE_GROUPS)
def optimizer_with_a_list(run):
    with run.scope():
        model = Net()
        optimizer = _QuasiNewton(model.parameters())
    return fit(run, model, optimizer)


class _OfModel(torch.optim.Optimizer):
    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.05})
        self.model, self.moved = model, {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    @torch.no_grad()
    def step(self, closure=None):
        for name, p in self.model.named_parameters():
            self.moved[name].mul_(0.9).add_(p.grad)
            p.sub_(self.moved[name], alpha=self.param_groups[0]["lr"])


@case("steps", "optimizer-with-its-model", refused=NOT_OF_THE_GROUPS)
def optimizer_with_its_model(run):
    with run.scope():
        model = Net()
        optimizer = _OfModel(model)
    return fit(run, model, optimizer)


def _of_vector(parameters):
    known = list(parameters)

    class OfVector(torch.optim.Optimizer):
        def __init__(self):
            super().__init__(known, {"lr": 0.05})
            self.moved = torch.zeros(sum(p.numel() for p in known))

        @torch.no_grad()
        def step(self, closure=None):
            self.moved.mul_(0.9).add_(parameters_to_vector([p.grad for p in known]))
            vector_to_parameters(parameters_to_vector(known) - 0.05 * self.moved, known)

    return OfVector()


@case("steps", "optimizer-with-its-parameters-in-a-closure", refused=NOT_OF_THE_GROUPS)
def optimizer_with_a_closure(run):
    with run.scope():
        model = Net()
        optimizer = _of_vector(model.parameters())
    return fit(run, model, optimizer)


def _orthogonal(gradient):
    x = gradient / (gradient.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x


class _Buffered(torch.optim.Optimizer):
    """Muon with a buffer of updates and its views in each group."""

    def __init__(self, parameters):
        groups = []
        for p in parameters:
            buffer = torch.empty(2, p.numel())
            groups.append({"params": [p], "buffer": buffer, "views": list(buffer)})
        super().__init__(groups, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            p = group["params"][0]
            moved = self.state[p].setdefault("moved", torch.zeros_like(p))
            moved.lerp_(p.grad, 0.1)
            group["views"][0].copy_(_orthogonal(p.grad.lerp_(moved, 0.9)).flatten())
            p.add_(group["buffer"][0].view_as(p), alpha=-group["lr"])


@case("steps", "optimizer-with-buffers-and-views-in-its-groups", refused={"servers": "hold a tensor of shape"})
def optimizer_with_buffers(run):
    with run.scope():
        model = Net()
        matrices = _Buffered([p for p in model.parameters() if p.ndim == 2])
        vectors = torch.optim.Adam([p for p in model.parameters() if p.ndim < 2], lr=0.01)

    def step(i):
        x, y = run.xy(i)
        F.mse_loss(model(x), y).backward()
        for optimizer in (matrices, vectors):
            optimizer.step()
        model.zero_grad()

    run.go(step)
    return run.result(model)


class _LastGradient(torch.optim.Optimizer):
    """Keeps the gradient itself, which the program then zeroes in place."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                p.sub_(p.grad + 0.3 * state.get("last", 0.0), alpha=group["lr"])
                state["last"] = p.grad


@case("steps", "optimizer-keeps-the-gradient-that-is-zeroed", forms=WITHOUT_SERVERS)
def optimizer_keeps_gradient(run):
    with run.scope():
        model = Net()
        optimizer = _LastGradient(model.parameters(), {"lr": 0.1})

    def step(i):
        x, y = run.xy(i)
        model.zero_grad(set_to_none=False)
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


# ---- models that change while they are trained --------------------------------------------------------------------


def _exchange(one, other):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        a.data, b.data = b.data, a.data


@case("steps", "average-takes-the-place-of-the-weights-in-the-step")
def exchanged_in_step(run):
    with run.scope():
        model = Net()
        average, optimizer = copy.deepcopy(model), sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 0.2)
            _exchange(model, average)
            value = run.mean(model(x).square().mean())
            _exchange(model, average)
        return value

    run.go(step)
    return run.result(model, average)


class _Adapted(nn.Module):
    """DoRA: a direction with an update of low rank, and its length."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(random(3, 2, base.in_features) * 0.2)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))
        self.length = nn.Parameter(base.weight.detach().norm(dim=1, keepdim=True))

    def weight(self):
        whole = self.base.weight + self.up @ self.down
        return self.length * whole / whole.norm(dim=1, keepdim=True).detach()

    def forward(self, x):
        return F.linear(x, self.weight(), self.base.bias)


def _adapt(model):
    for name, child in list(model.named_children()):
        setattr(model, name, _Adapted(child))


def _merge(model):
    for name, child in list(model.named_children()):
        child.base.weight.data.copy_(child.weight().detach())
        setattr(model, name, child.base.requires_grad_(True))


@case("steps", "adapters-injected-and-merged-in-the-step", refused={"central": "The step made the parameters"})
def adapters(run):
    class Trainer:
        def __init__(self):
            self.model = Net()
            self.optimizer = sgd(self.model)

        def __call__(self, i):
            if i == 2:
                _adapt(self.model)
                self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.05)
            if i == 5:
                _merge(self.model)
                self.optimizer = sgd(self.model)
            x, y = run.xy(i)
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), y).backward()
            self.optimizer.step()

    with run.scope():
        trainer = Trainer()
    run.go(trainer, 7)
    return run.result(trainer.model)
