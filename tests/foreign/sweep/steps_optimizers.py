"""Optimizers, wrappers, averages and trainers that programs write themselves."""

from __future__ import annotations

import collections
import dataclasses

import torch
from programs import Net, add, case, plain, sgd
from torch import nn, optim
from torch.nn import functional as F

TENSOR = "a tensor that the step names and no object holds is shared; a warning says so"


def sam(how):

    def f(run):
        with run.scope():
            model = Net()
            optimizer = sgd(model)

        def step(i):
            x, y = run.xy(i)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            ps = list(model.parameters())
            n = torch.stack([p.grad.norm() for p in ps]).norm()
            old = []
            with torch.no_grad():
                for p in ps:
                    e = p.grad * (0.05 / (n + 1e-12))
                    if how == "sub":
                        p.add_(e)
                        old.append(e)
                    elif how == "data":
                        old.append(p.data.clone())
                        p.data.add_(e)
                    elif how == "rebind":
                        old.append(p.data)
                        p.data = p.data + e
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for p, q in zip(ps, old, strict=False):
                    if how == "sub":
                        p.sub_(q)
                    else:
                        p.data = q
            optimizer.step()

        run.go(step)
        return run.result(model)

    return f


for h in ("sub", "data", "rebind"):
    add("steps", f"sam-{h}", sam(h))


class SAM(optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kw):
        super().__init__(params, dict(rho=rho, **kw))
        self.base = base(self.param_groups, **kw)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)

    @torch.no_grad()
    def first(self, zero=True):
        n = torch.norm(
            torch.stack([p.grad.norm(2) for g in self.param_groups for p in g["params"] if p.grad is not None]), 2
        )
        for g in self.param_groups:
            for p in g["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (g["rho"] / (n + 1e-12)))
        if zero:
            self.zero_grad()

    @torch.no_grad()
    def second(self, zero=True):
        for g in self.param_groups:
            for p in g["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        if zero:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first()
        closure()
        self.second()


@case("steps", "sam-class")
def sam_class(run):
    with run.scope():
        model = Net()
        optimizer = SAM(model.parameters(), optim.SGD, lr=0.1, momentum=0.9)

    def step(i):
        x, y = run.xy(i)
        F.mse_loss(model(x), y).backward()
        optimizer.first()
        F.mse_loss(model(x), y).backward()
        optimizer.second()

    run.go(step)
    return run.result(model)


@case("steps", "sam-closure")
def sam_closure(run):
    with run.scope():
        model = Net()
        optimizer = SAM(model.parameters(), optim.SGD, lr=0.1, momentum=0.9)

    def step(i):
        x, y = run.xy(i)

        def c():
            value = F.mse_loss(model(x), y)
            value.backward()
            return value

        c()
        optimizer.step(c)

    run.go(step)
    return run.result(model)


class Lookahead(optim.Optimizer):
    def __init__(self, base, k=3, a=0.5):
        self.base, self.k, self.a = (base, k, a)
        self.param_groups = base.param_groups
        self.state = collections.defaultdict(dict)
        self.defaults = base.defaults
        self._n = 0
        for g in self.param_groups:
            for p in g["params"]:
                self.state[p]["slow"] = p.detach().clone()

    def zero_grad(self, *a, **k):
        self.base.zero_grad(*a, **k)

    def step(self, closure=None):
        r = self.base.step(closure)
        self._n += 1
        if self._n % self.k == 0:
            for g in self.param_groups:
                for p in g["params"]:
                    q = self.state[p]["slow"]
                    q.add_(p.data - q, alpha=self.a)
                    p.data.copy_(q)
        return r


class Lookahead2:
    """plain class"""

    def __init__(self, base, k=3, a=0.5):
        self.base, self.k, self.a, self.n = (base, k, a, 0)
        self.slow = [[p.detach().clone() for p in g["params"]] for g in base.param_groups]

    def zero_grad(self):
        self.base.zero_grad()

    @torch.no_grad()
    def step(self):
        self.base.step()
        self.n += 1
        if self.n % self.k == 0:
            for g, sl in zip(self.base.param_groups, self.slow, strict=False):
                for p, q in zip(g["params"], sl, strict=False):
                    q.lerp_(p, self.a)
                    p.copy_(q)


for cls in (Lookahead, Lookahead2):
    for w in ("in", "out"):

        def f(run, cls=cls, w=w):
            with run.scope():
                model = Net()
                optimizer = sgd(model)
                optimizer = cls(optimizer) if w == "in" else optimizer
            optimizer = cls(optimizer) if w == "out" else optimizer
            run.go(plain(run, model, optimizer), 8)
            return run.result(model)

        add("steps", f"wrap-{cls.__name__}-{w}", f)


class Wrap(optim.Optimizer):
    def __init__(self, base):
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.k = 0

    def step(self, closure=None):
        self.k += 1
        [p.grad.mul_(1 / self.k) for g in self.param_groups for p in g["params"]]
        return self.base.step(closure)


@case("steps", "wrap-nested-optimizer")
def wrap_nested_optimizer(run):
    with run.scope():
        model = Net()
        optimizer = Wrap(sgd(model))
    run.go(plain(run, model, optimizer), 8)
    return run.result(model, k=optimizer.k)


class Own(optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            g["step"] += 1
            for p in g["params"]:
                if p.grad is not None:
                    train = self.state[p]
                    train.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    train["n"] = train.get("n", 0) + 1
                    p.sub_(train["m"], alpha=g["lr"] / g["step"])


@case("steps", "opt-own-group-step")
def opt_own_group_step(run):
    with run.scope():
        model = Net()
        optimizer = Own(model.parameters(), 0.1)
    run.go(plain(run, model, optimizer))
    return run.result(model, s=optimizer.param_groups[0]["step"], st=optimizer)


class Plain:
    """hand-written optimizer, no torch base"""

    def __init__(self, params, lr=0.1):
        self.p = list(params)
        self.v = {p: torch.zeros_like(p) for p in self.p}
        self.lr = lr
        self.t = 0

    def zero_grad(self):
        for p in self.p:
            p.grad = None

    @torch.no_grad()
    def step(self):
        self.t += 1
        for p in self.p:
            self.v[p].mul_(0.9).add_(p.grad)
            p -= self.lr / self.t * self.v[p]


for w in ("in", "out"):

    def f(run, w=w):
        with run.scope():
            model = Net()
            optimizer = Plain(model.parameters()) if w == "in" else None
        optimizer = optimizer or Plain(model.parameters())
        run.go(plain(run, model, optimizer))
        return run.result(model, t=optimizer.t)

    add("steps", f"opt-plain-class-{w}", f)


class Slots:
    __slots__ = ("p", "t", "v")

    def __init__(self, params):
        self.p = list(params)
        self.v = [torch.zeros_like(p) for p in self.p]
        self.t = 0

    def zero_grad(self):
        for p in self.p:
            p.grad = None

    @torch.no_grad()
    def step(self):
        self.t += 1
        for p, v in zip(self.p, self.v, strict=False):
            v.mul_(0.9).add_(p.grad)
            p.sub_(v, alpha=0.1 / self.t)


@case("steps", "opt-slots-class")
def opt_slots_class(run):
    with run.scope():
        model = Net()
        optimizer = Slots(model.parameters())
    run.go(plain(run, model, optimizer))
    return run.result(model)


@dataclasses.dataclass
class TS:
    model: nn.Module
    optimizer: optim.Optimizer
    n: int = 0
    ema: float = 0.0
