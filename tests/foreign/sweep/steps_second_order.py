"""Recomputation, second derivatives, several optimizers, odd parameters: the second part of ``steps_gradients``."""

from __future__ import annotations

import torch
from programs import Net, add, case, sgd, trains
from torch import nn, optim
from torch.nn import functional as F


@case("steps", "agrad-unreduced-step", refused="would apply a result of torch.autograd.grad")
def agrad_unreduced_step_u12(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        g = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        for p, q in zip(model.parameters(), g, strict=False):
            p.grad = q
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "manual-sgd")
def manual_sgd(run):
    with run.scope():
        model = Net()

    def step(i):
        x, y = run.xy(i)
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad.zero_()

    run.go(step)
    return run.result(model)


@case("steps", "manual-sgd-data")
def manual_sgd_data(run):
    with run.scope():
        model = Net()

    def step(i):
        x, y = run.xy(i)
        F.mse_loss(model(x), y).backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad.data
            p.grad = None

    run.go(step)
    return run.result(model)


def gan(run):
    with run.scope():
        G, D = (nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
        og, od = (optim.Adam(G.parameters(), lr=0.01), optim.Adam(D.parameters(), lr=0.01))

    def step(i):
        x = run.x(i)
        z = run.x(i + 50)
        od.zero_grad()
        f = G(z).detach()
        (F.softplus(-D(x)).mean() + F.softplus(D(f)).mean()).backward()
        od.step()
        D.requires_grad_(False)
        og.zero_grad()
        F.softplus(-D(G(z))).mean().backward()
        og.step()
        D.requires_grad_(True)

    run.go(step)
    return run.result(G, D)


add("steps", "gan", gan)


@case("steps", "gan-wgan-gp-two-runs")
def gan_wgan_gp_two_runs(run):
    with run.scope():
        G, D = (nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
        og, od = (optim.Adam(G.parameters(), lr=0.01), optim.Adam(D.parameters(), lr=0.01))

    def dstep(i):
        x = run.x(i)
        z = run.x(i + 50)
        f = G(z).detach()
        a = run.share(torch.rand(8, 1, generator=torch.Generator().manual_seed(i)))
        h = (a * x + (1 - a) * f).requires_grad_(True)
        (g,) = torch.autograd.grad(D(h).sum(), h, create_graph=True)
        od.zero_grad()
        (D(f).mean() - D(x).mean() + 10 * (g.norm(dim=1) - 1).pow(2).mean()).backward()
        od.step()

    def gstep(i):
        og.zero_grad()
        (-D(G(run.x(i + 50))).mean()).backward()
        og.step()

    for i in range(6):
        run.run(dstep, i)
        run.run(dstep, i + 100)
        run.run(gstep, i)
    return run.result(G, D)


@case("steps", "two-opts-alternate")
def two_opts_alternate(run):
    with run.scope():
        model = Net()
        o1 = sgd(model.a)
        second_optimizer = optim.Adam(model.b.parameters(), lr=0.01)

    def step(i):
        x, y = run.xy(i)
        o1.zero_grad()
        second_optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        (o1 if i % 2 else second_optimizer).step()

    run.go(step)
    return run.result(model)


class GRL(torch.autograd.Function):
    @staticmethod
    def forward(c, x, a):
        c.a = a
        return x.view_as(x)

    @staticmethod
    def backward(c, g):
        return (-c.a * g, None)


@case("steps", "custom-function-grl")
def custom_function_grl(run):
    with run.scope():
        model, d = (Net(), nn.Linear(3, 2))
        optimizer = optim.SGD([*model.parameters(), *d.parameters()], lr=0.1)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        p = model(x)
        (F.mse_loss(p, y) + F.cross_entropy(d(GRL.apply(p, 0.5)), run.ids(i, 2))).backward()
        optimizer.step()

    run.go(step)
    return run.result(model, d)


class Cplx(nn.Module):
    def __init__(self):
        super().__init__()
        self.z = nn.Parameter(torch.randn(6, 3, dtype=torch.cdouble))
        self.f = nn.Linear(6, 3, dtype=torch.cdouble)

    def forward(self, x):
        x = x.to(torch.cdouble)
        return (x @ self.z + self.f(x)).abs()


add("steps", "complex", trains(Cplx))

add("steps", "complex-adam", trains(Cplx, optimizer=lambda model: optim.Adam(model.parameters(), lr=0.01)))


class CL(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(2, 4, 3)
        self.l = nn.Linear(4, 3)

    def forward(self, x):
        return self.l(torch.tanh(self.c(x)).mean((2, 3)))


@case("steps", "channels_last")
def channels_last(run):
    with run.scope():
        model = CL().to(memory_format=torch.channels_last)
        optimizer = sgd(model)

    def step(i):
        x = run.x(i, 2, 6, 6).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        F.mse_loss(model(x), run.x(i + 50, 3)).backward()
        optimizer.step()
        return int(model.c.weight.is_contiguous(memory_format=torch.channels_last)) + 2 * int(
            model.c.weight.grad.is_contiguous(memory_format=torch.channels_last)
        )

    fl = [run.local(run.run(step, i))[-1] for i in range(6)]
    return run.result(model, fl=[float(v) for v in fl])


class NC(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 6).t())
        self.e = nn.Parameter(torch.randn(1, 3).expand(6, 3).clone())
        self.n = nn.Parameter(torch.empty(0))
        self.s = nn.Parameter(torch.tensor(1.0))
        self.hlf = nn.Parameter(torch.ones(3, dtype=torch.float32))

    def forward(self, x):
        return x @ (self.w + self.e) * self.s + self.hlf


add("steps", "noncontiguous-scalar-empty-mixed", trains(NC, optimizer=lambda model: sgd(model, 0.005)))


class PL(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.ParameterList([torch.randn(6, 3) for _ in range(2)])
        self.d = nn.ParameterDict({"a": torch.ones(3)})
        self.int = nn.Parameter(torch.tensor([3]), requires_grad=False)

    def forward(self, x):
        return x @ sum(self.p) * self.d["a"] / self.int


add("steps", "ParameterList-Dict", trains(PL))

add("steps", "embedding-maxnorm", lambda run: mxn(run))


def mxn(run):
    with run.scope():
        model = nn.Embedding(10, 3, max_norm=0.5)
        h = nn.Linear(3, 3)
        optimizer = optim.SGD([*model.parameters(), *h.parameters()], lr=0.1)

    def step(i):
        optimizer.zero_grad()
        F.mse_loss(h(model(run.ids(i, 10))), run.x(i, 3)).backward()
        optimizer.step()

    run.go(step)
    return run.result(model, h)


class VPar(nn.Parameter):
    pass


class Sub2(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = VPar(torch.randn(6, 3))
        self.w.tag = "x"
        self.w.lr_mult = 2.0

    def forward(self, x):
        assert self.w.tag == "x"
        assert type(self.w) is VPar
        return x @ self.w * self.w.lr_mult


add("steps", "parameter-subclass-attrs", trains(Sub2))


@case("steps", "bare-parameter-no-module", refused="none of its parameters belongs to the strategy")
def bare_parameter_no_module(run):
    with run.scope():
        w = nn.Parameter(torch.ones(6, 3))
        b = torch.zeros(3, requires_grad=True)
        optimizer = optim.SGD([w, b], lr=0.1)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(x @ w + b, y).backward()
        optimizer.step()

    run.go(step)
    return {"w": w, "b": b, "each": run.each(lambda: [w, b])}


@case("steps", "bare-parameter", refused="none of its parameters belongs to the strategy")
def bare_parameter(run):
    with run.scope():
        w = nn.Parameter(torch.ones(6, 3))
        optimizer = optim.SGD([w], lr=0.1)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(x @ w, y).backward()
        optimizer.step()

    run.go(step)
    return {"w": w, "each": run.each(lambda: [w])}
