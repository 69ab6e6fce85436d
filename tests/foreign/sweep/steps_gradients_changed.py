"""Steps that change gradients on their way, hook the nodes of the graph, and derive more than once."""

from __future__ import annotations

import torch
from programs import Net, case, random, sgd
from steps_kept import NODES, fit
from torch import nn
from torch.nn import functional as F


@case("steps", "fixed-point-with-a-hook")
def equilibrium(run):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.w, self.b = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
            self.hook = None

        def cell(self, z, x):
            return torch.tanh(0.3 * self.w(z) + self.a(x))

        def forward(self, x):
            z = torch.zeros(len(x), 8)
            with torch.no_grad():
                for _ in range(30):
                    z = self.cell(z, x)
            z = self.cell(z, x)
            start = z.detach().requires_grad_()
            f = self.cell(start, x)

            def backward(grad):
                if self.hook is not None:
                    self.hook.remove()
                    self.hook = None
                found = grad
                for _ in range(30):
                    found = torch.autograd.grad(f, start, found, retain_graph=True)[0] + grad
                return found

            self.hook = z.register_hook(backward)
            return self.b(z)

    with run.scope():
        model = Deep()
        optimizer = sgd(model)
    return fit(run, model, optimizer)


class _Reverse(torch.autograd.Function):
    """Forgets the activations, and computes them again with ``backward()`` inside of the backward pass."""

    @staticmethod
    def forward(ctx, x, layers):
        ctx.layers = layers
        a, b = x.chunk(2, 1)
        with torch.no_grad():
            for f, g in layers:
                a = a + f(b)
                b = b + g(a)
        ctx.save_for_backward(a, b)
        return torch.cat([a, b], 1)

    @staticmethod
    def backward(ctx, grad):
        a, b = (t.detach() for t in ctx.saved_tensors)
        da, db = grad.chunk(2, 1)
        for f, g in reversed(list(ctx.layers)):
            with torch.enable_grad():
                a.requires_grad_()
                ga = g(a)
                torch.autograd.backward(ga, db)
            with torch.no_grad():
                b, da, a = b - ga, da + a.grad, a.detach()
            with torch.enable_grad():
                b.requires_grad_()
                fb = f(b)
                torch.autograd.backward(fb, da)
            with torch.no_grad():
                a, db, b = a - fb, db + b.grad, b.detach()
        return torch.cat([da, db], 1), None


@case("steps", "reversible-layers")
def reversible(run):
    class Reversible(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)]) for _ in range(3)
            )
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.last(_Reverse.apply(self.first(x), self.layers))

    with run.scope():
        model = Reversible()
        optimizer = sgd(model)
    return fit(run, model, optimizer)


@case("steps", "multi-grad-hook", differs=dict.fromkeys(("replicas", "central"), NODES))
def multi_grad_hook(run):
    with run.scope():
        model = Net()
        model.fired = 0
        optimizer = sgd(model)

        def fired(gradients):
            model.fired += sum(g is not None for g in gradients)

        torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), fired)
    found = fit(run, model, optimizer)
    return {**found, "fired": run.each(lambda: model.fired)}


@case("steps", "node-of-a-parameter-hooked", differs=dict.fromkeys(("replicas", "central"), NODES))
def accumulating_node(run):
    with run.scope():
        model = Net()
        model.seen, model.nodes = 0, []
        optimizer = sgd(model)
        for p in model.parameters():
            model.nodes.append(p.expand_as(p).grad_fn.next_functions[0][0])

    def seen(*ignored):
        model.seen += 1

    for node in model.nodes:
        node.register_hook(seen)
    found = fit(run, model, optimizer)
    return {**found, "seen": run.each(lambda: model.seen)}


@case("steps", "node-hooks")
def node_hooks(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def loss(x, y):
        found = model(x)
        found.grad_fn.register_prehook(lambda grads: tuple(2 * g for g in grads))
        value = F.mse_loss(found, y)
        value.grad_fn.register_hook(lambda inputs, outputs: tuple(g if g is None else 0.5 * g for g in inputs))
        return value

    return fit(run, model, optimizer, loss=loss)


@case("steps", "jacobian-of-the-model")
def jacobian(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def loss(x, y):
        matrix = torch.autograd.functional.jacobian(lambda v: model(v).sum(0), x, create_graph=True)
        return F.mse_loss(model(x), y) + 0.1 * matrix.pow(2).sum() / len(x)

    return fit(run, model, optimizer, loss=loss)


@case("steps", "virtual-adversary")
def virtual_adversary(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def loss(x, y):
        with torch.no_grad():
            wanted = model(x)
        d = F.normalize(torch.ones_like(x) + x, dim=1)
        for _ in range(2):
            d = d.detach().requires_grad_()
            d = F.normalize(torch.autograd.grad((model(x + 0.1 * d) - wanted).pow(2).sum(), d)[0], dim=1)
        model.zero_grad()
        return F.mse_loss(model(x), y) + (model(x + 0.1 * d.detach()) - wanted).pow(2).mean()

    return fit(run, model, optimizer, loss=loss)


@case("steps", "equation-of-derivatives")
def pinn(run):
    with run.scope():
        model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(i):
        t, x = (run.x(i + k, 1).requires_grad_() for k in (0, 100))
        u = model(torch.cat([t, x], 1))
        ones = torch.ones_like(u)
        ut, ux = torch.autograd.grad(u, (t, x), ones, create_graph=True)
        uxx = torch.autograd.grad(ux, x, ones, create_graph=True)[0]
        optimizer.zero_grad()
        (ut + u * ux - 0.1 * uxx).pow(2).mean().backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "energy-with-langevin")
def energy(run):
    with run.scope():
        model = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 1))
        model.register_buffer("memory", random(3, 6), persistent=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(i):
        x = run.x(i)
        model.requires_grad_(False)
        fake = (x * 0 + model.memory).requires_grad_()
        for _ in range(4):
            fake.data -= 0.1 * torch.autograd.grad(model(fake).sum(), fake)[0]
        model.requires_grad_(True)
        optimizer.zero_grad()
        (model(x).mean() - model(fake.detach()).mean() + 0.1 * model(x).pow(2).mean()).backward()
        optimizer.step()
        model.memory = run.mean(fake.detach().mean(0))

    run.go(step)
    return run.result(model)


@case("steps", "chunks-with-a-step-each")
def chunks(run):
    with run.scope():
        model = nn.GRU(6, 8, batch_first=True)
        head = nn.Linear(8, 3)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)

    def step(i):
        x, hidden = run.x(i, 9, 6), None
        for k in range(0, 9, 3):
            found, hidden = model(x[:, k : k + 3], hidden)
            hidden = hidden.detach()
            optimizer.zero_grad()
            head(found).pow(2).mean().backward()
            nn.utils.clip_grad_value_([*model.parameters(), *head.parameters()], 0.05)
            optimizer.step()

    run.go(step)
    return run.result(model, head)


@case("steps", "gradients-filtered-by-a-mean-on-the-trainer")
def grokfast(run):
    class Trainer:
        def __init__(self):
            self.model, self.grads = Net(), None
            self.optimizer = sgd(self.model)

        def filtered(self, alpha=0.8, lamb=2.0):
            own = {n: p.grad.data.detach() for n, p in self.model.named_parameters()}
            if self.grads is None:
                self.grads = own
            for n, p in self.model.named_parameters():
                self.grads[n] = self.grads[n] * alpha + own[n] * (1 - alpha)
                p.grad.data = p.grad.data + self.grads[n] * lamb

        def step(self, i):
            x, y = run.xy(i)
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x), y).backward()
            self.filtered()
            self.optimizer.step()

    with run.scope():
        trainer = Trainer()
    run.go(trainer.step)
    return run.result(trainer.model)


@case("steps", "adaptive-clip-and-centre")
def adaptive_clip(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for p in model.parameters():
            if p.ndim > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))
                unit, grad = p.norm(dim=1, keepdim=True).clamp(min=1e-3), p.grad.norm(dim=1, keepdim=True)
                p.grad.copy_(torch.where(grad > 0.1 * unit, p.grad * (0.1 * unit / grad.clamp(min=1e-6)), p.grad))
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "slow-weights-in-the-state-of-the-optimizer")
def slow_in_state(run):
    with run.scope():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def slow(i):
        for p in model.parameters():
            state = optimizer.state[p]
            if "slow" not in state:
                state["slow"] = p.detach().clone()
            elif i % 2:
                state["slow"].lerp_(p.detach(), 0.5)
                p.data.copy_(state["slow"])

    return fit(run, model, optimizer, slow)
