"""The second part of ``steps_optimizers``."""

from __future__ import annotations

import copy

import torch
from programs import Net, add, case, plain, random, sgd
from steps_optimizers import TS
from torch.nn import functional as F

TENSOR = "a tensor that the step names and no object holds is shared; a warning says so"


@case("steps", "state-dataclass")
def state_dataclass(run):
    with run.scope():
        model = Net()
        ts = TS(model, sgd(model))

    def step(i):
        x, y = run.xy(i)
        ts.optimizer.zero_grad()
        (F.mse_loss(ts.model(x), y) / (1 + ts.n)).backward()
        ts.optimizer.step()
        ts.n += 1

    run.go(step)
    return run.result(model, n=ts.n)


@case("steps", "state-list-counter-unused")
def state_list_counter_unused(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    n = [0]

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        n[0] += 1
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "state-closure-tensor-list", differs={"replicas": TENSOR})
def state_closure_tensor_list(run):
    with run.scope():
        model = Net()
    v = [torch.zeros_like(p) for p in model.parameters()]

    def step(i):
        x, y = run.xy(i)
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p, q in zip(model.parameters(), v, strict=False):
                q.mul_(0.9).add_(p.grad)
                p.sub_(q, alpha=0.1)

    run.go(step)
    return run.result(model)


@case("steps", "state-closure-tensor-dict", differs={"replicas": TENSOR})
def state_closure_tensor_dict(run):
    with run.scope():
        model = Net()
    v = {n: torch.zeros_like(p) for n, p in model.named_parameters()}

    def step(i):
        x, y = run.xy(i)
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for n, p in model.named_parameters():
                v[n].mul_(0.9).add_(p.grad)
                p.sub_(v[n], alpha=0.1)

    run.go(step)
    return run.result(model)


@case("steps", "state-closure-tensor", differs={"replicas": TENSOR, "central": TENSOR})
def state_closure_tensor(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    running = torch.zeros(3)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        p = model(x)
        running.mul_(0.9).add_(1.0)
        F.mse_loss(p * running, y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


def ema(how, where="in"):

    def f(run):
        with run.scope():
            model = Net()
            optimizer = sgd(model)
            t = copy.deepcopy(model) if where == "in" else None
        t = t or copy.deepcopy(model)
        if how != "grad":
            t.requires_grad_(False)

        def step(i):
            x, y = run.xy(i)
            optimizer.zero_grad()
            with torch.no_grad():
                z = t(x)
            p = model(x)
            (F.mse_loss(p, y) + F.mse_loss(p, z)).backward()
            optimizer.step()
            with torch.no_grad():
                if how == "sd":
                    a, b = (t.state_dict(), model.state_dict())
                    for k in a:
                        a[k].mul_(0.9).add_(b[k], alpha=0.1)
                elif how == "load":
                    t.load_state_dict({k: 0.9 * v + 0.1 * model.state_dict()[k] for k, v in t.state_dict().items()})
                elif how == "data":
                    for a, b in zip(t.parameters(), model.parameters(), strict=False):
                        a.data = 0.9 * a.data + 0.1 * b.data
                elif how == "foreach":
                    torch._foreach_lerp_(list(t.parameters()), list(model.parameters()), 0.1)
                else:
                    for a, b in zip(t.parameters(), model.parameters(), strict=False):
                        a.mul_(0.9).add_(b, alpha=0.1)

        run.go(step)
        return run.result(model, t)

    return f


for h in ("inplace", "grad", "sd", "load", "data", "foreach"):
    for w in ("in", "out"):
        add("steps", f"ema-{h}-{w}", ema(h, w))


class EMA:
    def __init__(self, model, d=0.9):
        self.m, self.d, self.n = (model, d, 0)
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.back = []

    @torch.no_grad()
    def update(self):
        self.n += 1
        d = min(self.d, (1 + self.n) / (10 + self.n))
        for q, p in zip(self.shadow, self.m.parameters(), strict=False):
            q.sub_((1 - d) * (q - p))

    def store(self):
        self.back = [p.detach().clone() for p in self.m.parameters()]

    def swap(self):
        for q, p in zip(self.shadow, self.m.parameters(), strict=False):
            p.data.copy_(q.data)

    def restore(self):
        for q, p in zip(self.back, self.m.parameters(), strict=False):
            p.data.copy_(q.data)


class EMADict(EMA):
    def __init__(self, model, d=0.9):
        self.m, self.d, self.n, self.back = (model, d, 0, {})
        self.shadow = {k: p.data.clone() for k, p in model.named_parameters()}

    def update(self):
        for k, p in self.m.named_parameters():
            self.shadow[k] = (1 - self.d) * p.data + self.d * self.shadow[k]

    def store(self):
        self.back = {k: p.data for k, p in self.m.named_parameters()}

    def swap(self):
        for k, p in self.m.named_parameters():
            p.data = self.shadow[k]

    def restore(self):
        for k, p in self.m.named_parameters():
            p.data = self.back[k]


for cls in (EMA, EMADict):
    for w in ("in", "out"):
        for how in ("step", "after"):

            def f(run, cls=cls, w=w, how=how):
                with run.scope():
                    model = Net()
                    optimizer = sgd(model)
                    e = cls(model) if w == "in" else None
                e = e or cls(model)
                train = plain(run, model, optimizer, extra=(lambda i: e.update()) if how == "step" else None)
                for i in range(5):
                    run.run(train, i)
                    if how == "after":
                        e.update()
                x = random(5, 8, 6)
                e.store()
                e.swap()
                ev = model(x).detach()
                evr = run.each(lambda: model(x))
                e.restore()
                run.go(train, 2)
                return run.result(model, sh=e.shadow, ev=ev, evr=evr, she=run.each(lambda: e.shadow))

            add("steps", f"ema-{cls.__name__}-{w}-{how}", f)


@case("steps", "ema-swap-in-step")
def ema_swap_in_step(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
        e = EMA(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        e.update()
        e.store()
        e.swap()
        with torch.no_grad():
            model(x).mean()
        e.restore()

    run.go(step)
    return run.result(model, sh=e.shadow)


@case("steps", "ema-moco")
def ema_moco(run):
    with run.scope():
        q, k = (Net(), Net())
        k.load_state_dict(q.state_dict())
        k.requires_grad_(False)
        optimizer = sgd(q)
        k.register_buffer("queue", torch.zeros(3, 12))
        k.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def step(i):
        x, _y = run.xy(i)
        with torch.no_grad():
            for a, b in zip(k.parameters(), q.parameters(), strict=False):
                a.data = a.data * 0.9 + b.data * 0.1
            z = k(x)
        optimizer.zero_grad()
        (F.mse_loss(q(x), z) + q(x).mm(k.queue.clone()).pow(2).mean()).backward()
        optimizer.step()
        p = int(k.ptr)
        k.queue[:, p : p + 2] = 1.0
        k.ptr[0] = (p + 2) % 12

    run.go(step)
    return run.result(q, k)
