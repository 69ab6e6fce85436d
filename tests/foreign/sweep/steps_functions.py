"""Ways to give a step function, and what it may do beside training."""

from __future__ import annotations

import copy
import functools
import io

import steps_module
import torch
from programs import Net, add, case, plain, sgd
from torch import optim
from torch.nn import functional as F


@case("steps", "step-args")
def step_args(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(model, optimizer, i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    for i in range(6):
        run.run(step, model, optimizer, i)
    return run.result(model)


@case("steps", "step-kwargs")
def step_kwargs(run):
    with run.scope():
        model = Net()
        optimizer = optim.Adam(model.parameters(), lr=0.01)
        self = optim.lr_scheduler.StepLR(optimizer, 2)

    def step(i, *, model, opt, sch):
        x, y = run.xy(i)
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
        sch.step()

    for i in range(6):
        run.run(step, i, model=model, opt=optimizer, sch=self)
    return run.result(model, e=self.last_epoch)


@case("steps", "step-dict-arg")
def step_dict_arg(run):
    with run.scope():
        train = {"m": Net()}
        train["o"] = sgd(train["m"])
        train["n"] = 0

    def step(i, train):
        x, y = run.xy(i)
        train["o"].zero_grad()
        F.mse_loss(train["m"](x), y).backward()
        train["o"].step()

    for i in range(6):
        run.run(step, i, train)
    model = train["m"]
    return run.result(model)


@case("steps", "step-partial")
def step_partial(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(model, optimizer, i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    run.go(functools.partial(step, model, optimizer))
    return run.result(model)


@case("steps", "step-lambda")
def step_lambda(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    run.go(
        lambda i: (optimizer.zero_grad(), F.mse_loss(model(run.xy(i)[0]), run.xy(i)[1]).backward(), optimizer.step())[0]
    )
    return run.result(model)


class Step:
    def __init__(self, run, model, optimizer):
        self.E, self.m, self.o, self.n = (run, model, optimizer, 0)
        self.v = torch.zeros(3)

    def __call__(self, i):
        x, y = self.E.xy(i)
        self.n += 1
        self.v.add_(1)
        self.o.zero_grad()
        (F.mse_loss(self.m(x) + self.v, y) / self.n).backward()
        self.o.step()


@case("steps", "step-callable")
def step_callable(run):
    with run.scope():
        model = Net()
        train = Step(run, model, sgd(model))
    run.go(train)
    return run.result(model, n=train.n, v=train.v)


class SSlots:
    __slots__ = ("E", "m", "o")

    def __init__(self, run, model, optimizer):
        self.E, self.m, self.o = (run, model, optimizer)

    def __call__(self, i):
        x, y = self.E.xy(i)
        self.o.zero_grad()
        F.mse_loss(self.m(x), y).backward()
        self.o.step()


@case("steps", "step-callable-slots")
def step_callable_slots(run):
    with run.scope():
        model = Net()
        train = SSlots(run, model, optim.Adam(model.parameters(), lr=0.01))
    run.go(train)
    return run.result(model, o=train.o)


class OfTheClass:
    @staticmethod
    def step(i):
        x, y = G["E"].xy(i)
        G["o"].zero_grad()
        F.mse_loss(G["m"](x), y).backward()
        G["o"].step()

    @classmethod
    def cstep(cls, i):
        x, y = cls.E.xy(i)
        cls.o.zero_grad()
        F.mse_loss(cls.m(x), y).backward()
        cls.o.step()


G = {}


@case("steps", "step-static")
def step_static(run):
    with run.scope():
        model = Net()
        G.update(E=run, m=model, o=optim.Adam(model.parameters(), lr=0.01))
    run.go(OfTheClass.step)
    return run.result(model, o=G["o"])


@case("steps", "step-classmethod")
def step_classmethod(run):
    with run.scope():
        model = Net()
        OfTheClass.E, OfTheClass.m, OfTheClass.o = (run, model, optim.Adam(model.parameters(), lr=0.01))
    run.go(OfTheClass.cstep)
    return run.result(model, o=OfTheClass.o)


@case("steps", "step-other-module")
def step_other_module(run):
    steps_module.env = run
    with run.scope():
        model = steps_module.model = Net()
        steps_module.optimizer = optim.Adam(model.parameters(), lr=0.01)
    run.go(steps_module.step)
    return run.result(model, o=steps_module.optimizer)


@case("steps", "step-other-module-lambda")
def step_other_module_lambda(run):
    with run.scope():
        model = Net()
        steps_module.M.update(env=run, m=model, o=optim.Adam(model.parameters(), lr=0.01))
    run.go(lambda i: steps_module.helper(i))
    return run.result(model, o=steps_module.M["o"])


@case("steps", "step-other-module-state")
def step_other_module_state(run):
    steps_module.env = run
    with run.scope():
        model = steps_module.state.m = Net()
        steps_module.state.o = optim.Adam(model.parameters(), lr=0.01)
    steps_module.state.n = 0

    def inner(i):
        steps_module.step2(i)

    run.go(inner)
    return run.result(model, n=steps_module.state.n, o=steps_module.state.o)


def deco(fn):

    @functools.wraps(fn)
    def w(*a, **k):
        return fn(*a, **k)

    return w


def deco2(fn):
    return lambda *a: fn(*a)


for d in (deco, deco2):

    def f(run, d=d):
        with run.scope():
            model = Net()
            optimizer = optim.Adam(model.parameters(), lr=0.01)

        run.go(d(plain(run, model, optimizer)))
        return run.result(model, o=optimizer)

    add("steps", f"step-decorated-{d.__name__}", f)


@case("steps", "step-nested-functions")
def step_nested_functions(run):
    with run.scope():
        model = Net()
        optimizer = optim.Adam(model.parameters(), lr=0.01)
        S = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def fwd(x):
        return model(x)

    def lossf(x, y):
        return F.mse_loss(fwd(x), y)

    def upd():
        optimizer.step()
        S.step()

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        lossf(x, y).backward()
        upd()

    run.go(step)
    return run.result(model, o=optimizer, e=S.last_epoch)


@case("steps", "step-dict-none")
def step_dict_none(run):
    with run.scope():
        model = Net()
    H = {}

    def step(i):
        x, y = run.xy(i)
        if "o" not in H or i == 0:
            H["o"] = None
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            [p.sub_(p.grad, alpha=0.1) for p in model.parameters()]

    run.go(step)
    return run.result(model)


@case("steps", "opt-made-in-step")
def opt_made_in_step(run):
    with run.scope():
        model = Net()

    def step(i):
        x, y = run.xy(i)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "opt-made-in-step-kept")
def opt_made_in_step_kept(run):
    with run.scope():
        model = Net()

    def step(i):
        if not hasattr(model, "opt"):
            model.opt = optim.Adam(model.parameters(), lr=0.01)
        x, y = run.xy(i)
        model.opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        model.opt.step()

    run.go(step)
    return run.result(model)


@case("steps", "loop-in-run")
def loop_in_run(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    def many():
        [step(i) for i in range(6)]

    run.run(many)
    return run.result(model)


@case("steps", "deepcopy-in-step")
def deepcopy_in_step(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        c = copy.deepcopy(model)
        optim.SGD(c.parameters(), lr=0.05)
        with torch.no_grad():
            t = c(x)
        optimizer.zero_grad()
        F.mse_loss(model(x), y + 0.1 * t).backward()
        optimizer.step()
        b = io.BytesIO()
        torch.save(model.state_dict(), b)
        c.load_state_dict(torch.load((b.seek(0), b)[1]))

    run.go(step)
    return run.result(model)


@case("steps", "reptile")
def reptile(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
        c = copy.deepcopy(model)
        co = optim.SGD(c.parameters(), lr=0.05)

    def step(i):
        c.load_state_dict(model.state_dict())
        for k in range(2):
            x, y = run.xy(10 * i + k)
            co.zero_grad()
            F.mse_loss(c(x), y).backward()
            co.step()
        for p, q in zip(model.parameters(), c.parameters(), strict=False):
            p.grad = (p - q).detach()
        optimizer.step()

    run.go(step)
    return run.result(model, c)
