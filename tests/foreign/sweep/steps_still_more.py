"""The second part of ``steps_more``."""

from __future__ import annotations

import torch
from programs import Net, add, case, plain, sgd, trains
from steps_more import ByHand
from torch import nn
from torch.nn import functional as F


@case("steps", "python-iter-attr")
def python_iter_attr(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    class It:
        def __init__(self):
            self.k = -1

        def __next__(self):
            self.k += 1
            return self.k

    def gen():
        k = 0
        while True:
            yield k
            k += 1

    g = gen()

    def step():
        i = next(g) if not run.strategy else model.__dict__.setdefault("gg", 0)
        model.gg = i + 1
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    for _ in range(6):
        run.run(step)
    return run.result(model)


@case("steps", "saved-tensors-hooks-anomaly")
def saved_tensors_hooks_anomaly(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.numpy() if not t.requires_grad else t,
                lambda t: torch.from_numpy(t) if not isinstance(t, torch.Tensor) else t,
            ),
            torch.autograd.set_detect_anomaly(True),
        ):
            F.mse_loss(model(x), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "jit-trace", refused=dict.fromkeys(("replicas", "central"), "A torch.jit module keeps its parameters"))
def jit_trace(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    run.go(plain(run, torch.jit.trace(model, torch.zeros(2, 6)), optimizer))
    return run.result(model)


@case("steps", "jit-script", refused=dict.fromkeys(("replicas", "central"), "A torch.jit module keeps its parameters"))
def jit_script(run):
    with run.scope():
        model = torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer))
    return run.result(model)


@case("steps", "fx-trace")
def fx_trace(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    fx = torch.fx.symbolic_trace(model)
    run.go(plain(run, fx, optimizer))
    return run.result(model, fx)


class MyF(torch.autograd.Function):
    @staticmethod
    def forward(c, x, w):
        c.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(c, g):
        x, w = c.saved_tensors
        return (g @ w.t(), x.t() @ g)


class CF(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3))

    def forward(self, x):
        return MyF.apply(x, self.w)


add("steps", "custom-function-saves-param", trains(CF))


@case("steps", "retain_grad")
def retain_grad(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        p = model(x)
        p.retain_grad()
        value = F.mse_loss(p, y)
        value.backward()
        assert p.grad is not None
        with torch.no_grad():
            model.b.bias -= 0.1 * (p.grad.sum(0) if not run.strategy else run.mean(p.grad.sum(0)))
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "hook-remove-between")
def hook_remove_between(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    h = model.a.weight.register_hook(lambda g: g * 2)
    train = plain(run, model, optimizer)
    run.go(train, 2)
    h.remove()
    run.go(train, 2)
    h = model.a.weight.register_hook(lambda g: g * 3)
    run.go(train, 2)
    return run.result(model)


@case("steps", "unused-by-step")
def unused_by_step(run):
    with run.scope():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        if i % 2:
            x = model[0](x)
            F.mse_loss(model[2](x), y).backward()
        else:
            F.mse_loss(model(x), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


class Cond(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(6, 3), nn.Linear(6, 3))

    def forward(self, x, r):
        return self.a(x) if r else self.b(x)


@case("steps", "unused-on-one-replica", reference="ranks")
def unused_on_one_replica(run):
    with run.scope():
        model = Cond()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x, run.replica()), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case(
    "steps", "bare-parameter-plain-opt", differs="a parameter of no module and no torch optimizer is each replica's own"
)
def bare_parameter_plain_opt(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
        pl = ByHand([nn.Parameter(torch.ones(3))])
    sc = pl.params[0]

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        pl.zero_grad()
        F.mse_loss(model(x) * sc, y).backward()
        optimizer.step()
        pl.step()

    run.go(step)
    return {"m": model, "s": sc, "e": run.each(lambda: [model, sc])}


@case("steps", "meter-object")
def meter_object(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    class Meter:
        def __init__(self):
            self.s = torch.zeros(())
            self.n = 0

        def add(self, v):
            self.s += v
            self.n += 1

    mt = Meter()

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        mt.add(1.0)

    run.go(step)
    return run.result(model, n=mt.n, s=mt.s)
