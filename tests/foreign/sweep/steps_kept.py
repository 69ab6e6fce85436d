"""Steps that keep numbers in helpers, and tensors that are views of others."""

from __future__ import annotations

import torch
from programs import Net, case, sgd
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def fit(run, model, optimizer, extra=None, loss=None):
    """Steps of a model whose ``forward`` gives the prediction."""

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        value = loss(x, y) if loss else F.mse_loss(model(x), y)
        value.backward()
        optimizer.step()
        if extra:
            extra(i)

    run.go(step)
    return run.result(model)


# ---- objects that hold no tensors ---------------------------------------------------------------------------------


class _Anneal:
    """A weight that grows with the calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return min(1.0, self.calls / 10)


class _Annealed(Net):
    def __init__(self):
        super().__init__()
        self.anneal = _Anneal()

    def forward(self, x):
        return super().forward(x) * self.anneal()


@case("steps", "helper-of-a-module-counts")
def helper_of_a_module(run):
    with run.scope():
        model = _Annealed()
        optimizer = sgd(model)
    return {**fit(run, model, optimizer), "calls": model.anneal.calls}


class _WithHelper(torch.optim.SGD):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.anneal = _Anneal()

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.1 * self.anneal()
        return super().step(closure)


@case("steps", "helper-of-an-optimizer-counts")
def helper_of_an_optimizer(run):
    with run.scope():
        model = Net()
        optimizer = _WithHelper(model.parameters(), lr=0.1)
    return fit(run, model, optimizer)


class _Keyed:
    """Keeps what it knows of each parameter by the parameter, in objects of its own."""

    def __init__(self, parameters):
        self.seen = {p: _Anneal() for p in parameters}

    def scale(self):
        for p, anneal in self.seen.items():
            p.grad.mul_(anneal())


ONE_COPY = "under central storage a write to the one copy through another tensor of its memory is made by each replica"
NODES = "hooks on the nodes that accumulate gradients, registered outside of run, are those of replica 0"


@case("steps", "object-of-counters-by-parameter")
def counters_by_parameter(run):
    with run.scope():
        model = Net()
        optimizer, keyed = sgd(model), _Keyed(model.parameters())

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        keyed.scale()
        optimizer.step()

    run.go(step)
    return run.result(model)


class _Shadow:
    def __init__(self, model):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)


class _Deep(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return x[:, :3]


@case("steps", "shadow-of-three-hundred-parameters")
def long_shadow(run):
    with run.scope():
        model = _Deep(150)
        optimizer, shadow = sgd(model, 0.01), _Shadow(model)
    found = fit(run, model, optimizer, lambda i: shadow.update(model))
    return {**found, "shadow": shadow.shadow, "shadows": run.each(lambda: shadow.shadow)}


@case("steps", "object-with-a-long-list-of-tensors-and-a-model")
def long_list(run):
    class Tracker:
        def __init__(self, model):
            self.model, self.slow = model, [p.detach().clone() for p in model.parameters()]

        def update(self):
            torch._foreach_lerp_(self.slow, [p.detach() for p in self.model.parameters()], 0.1)

    with run.scope():
        model = _Deep(150)
        optimizer, tracker = sgd(model, 0.01), Tracker(model)
    found = fit(run, model, optimizer, lambda i: tracker.update())
    return {**found, "slow": tracker.slow, "slows": run.each(lambda: tracker.slow)}


# ---- tensors that share memory ------------------------------------------------------------------------------------


class _Alias(nn.Module):
    """Keeps ``weight.data`` as an attribute, as codebooks are."""

    def __init__(self, detach):
        super().__init__()
        self.embed, self.a = nn.Embedding(5, 6), nn.Linear(6, 3)
        self.table = self.embed.weight.detach() if detach else self.embed.weight.data

    def forward(self, x):
        nearest = torch.cdist(x, self.table).argmin(1)
        return self.a(self.embed(nearest) + x)


@case("steps", "attribute-is-data-of-a-parameter")
def alias_data(run):
    with run.scope():
        model = _Alias(False)
        optimizer = sgd(model)
    return {**fit(run, model, optimizer), "tables": run.each(lambda: model.table)}


@case("steps", "attribute-is-detached-parameter")
def alias_detach(run):
    with run.scope():
        model = _Alias(True)
        optimizer = sgd(model)
    return {**fit(run, model, optimizer), "tables": run.each(lambda: model.table)}


class _Views(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("both", torch.ones(4))
        self.first, self.last = self.both[:2], self.both[2:]

    def forward(self, x):
        self.both += 0.1
        return super().forward(x) * self.first.sum() / self.last.mean()


@case("steps", "attribute-is-a-view-of-a-buffer")
def buffer_views(run):
    with run.scope():
        model = _Views()
        optimizer = sgd(model, 0.01)
    return {**fit(run, model, optimizer), "views": run.each(lambda: [model.first, model.last])}


@case("steps", "buffer-of-two-modules")
def shared_buffer(run):
    class Part(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.register_buffer("scale", scale)

        def forward(self, x):
            self.scale.mul_(1.01)
            return torch.tanh(self.a(x)) * self.scale.clone()

    with run.scope():
        scale = torch.ones(6)
        model = nn.Sequential(Part(scale), Part(scale), nn.Linear(6, 3))
        optimizer = sgd(model)
    return fit(run, model, optimizer)


class _Flat:
    """All gradients of a model in one tensor, of which they are views."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.grad = torch.zeros(sum(p.numel() for p in self.parameters))
        self.attach()

    def attach(self):
        start = 0
        for p in self.parameters:
            p.grad = self.grad[start : start + p.numel()].view_as(p)
            start += p.numel()


@case("steps", "gradients-are-views-of-one-tensor")
def flat_gradients(run):
    with run.scope():
        model = Net()
        optimizer, flat = sgd(model), _Flat(model)

    def step(i):
        x, y = run.xy(i)
        flat.grad.zero_()
        F.mse_loss(model(x), y).backward()
        flat.grad.mul_(torch.clamp(0.3 / flat.grad.norm(), max=1.0))
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "gradients-are-made-views-in-the-step")
def flat_gradients_in_step(run):
    with run.scope():
        model = Net()
        optimizer, flat = sgd(model), _Flat(model)

    def step(i):
        x, y = run.xy(i)
        flat.grad.zero_()
        flat.attach()
        F.mse_loss(model(x), y).backward()
        flat.grad.mul_(torch.clamp(0.3 / flat.grad.norm(), max=1.0))
        optimizer.step()

    run.go(step)
    return run.result(model)


class _FlatParameters:
    """All values of a model in one tensor, of which the parameters are views."""

    def __init__(self, model):
        self.model = model
        self.data = parameters_to_vector(model.parameters()).detach().clone()
        vector_to_parameters(self.data, model.parameters())

    def step(self, rate):
        self.data.sub_(parameters_to_vector(p.grad for p in self.model.parameters()), alpha=rate)


@case("steps", "parameters-are-views-of-one-tensor", differs={"central": ONE_COPY})
def flat_parameters(run):
    with run.scope():
        model = Net()
        flat = _FlatParameters(model)

    def step(i):
        x, y = run.xy(i)
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        flat.step(0.1)

    run.go(step)
    return run.result(model)


@case("steps", "optimizer-over-views-of-one-tensor", differs={"central": ONE_COPY})
def flat_parameters_optimizer(run):
    with run.scope():
        model = Net()
        flat, optimizer = _FlatParameters(model), sgd(model)

    def decayed(i):
        flat.data.mul_(0.99)

    return fit(run, model, optimizer, decayed)


@case("steps", "state-is-a-view-of-a-parameter")
def row_of_a_parameter(run):
    class Rows:
        def __init__(self, model):
            self.model, self.row = model, model.a.weight.data[0]

    with run.scope():
        model = Net()
        optimizer, rows = sgd(model), Rows(model)
    return fit(run, model, optimizer, lambda i: rows.row.clamp_(-0.1, 0.1))
