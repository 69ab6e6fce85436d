"""Hooks, torch.func, recomputation, second derivatives, several optimizers, odd parameters."""

from __future__ import annotations

import torch
from programs import Net, add, case, plain, sgd, trains
from torch import nn, optim
from torch.func import functional_call, grad as fgrad, jacrev, stack_module_state, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def hook(reg, where):

    def f(run):
        with run.scope():
            model = Net()
            optimizer = sgd(model)
            if where == "in":
                reg(model)
        if where == "out":
            reg(model)
        if where == "between":
            run.go(plain(run, model, optimizer), 2)
            hs = reg(model)

        def step(i):
            if where == "step":
                h = reg(model)
            x, y = run.xy(i)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if where == "step":
                [v.remove() for v in (h if isinstance(h, list) else [h])]

        run.go(step, 4)
        if where == "between":
            [v.remove() for v in (hs if isinstance(hs, list) else [hs])]
            run.go(step, 2)
        return run.result(model)

    return f


HK = {
    "param": lambda model: model.a.weight.register_hook(lambda g: g * 2),
    "params": lambda model: [p.register_hook(lambda g: g.clamp(-0.01, 0.01) * 0 + g * 0.5) for p in model.parameters()],
    "postacc": lambda model: model.a.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(2), None)[1]),
    "fwd": lambda model: model.a.register_forward_hook(lambda self, i, optimizer: optimizer * 1.5),
    "fwdpre": lambda model: model.a.register_forward_pre_hook(lambda self, i: (i[0] * 0.5,)),
    "bwd": lambda model: model.b.register_full_backward_hook(lambda self, gi, go: (gi[0] * 0.5,)),
    "bwdpre": lambda model: model.b.register_full_backward_pre_hook(lambda self, go: (go[0] * 0.5,)),
    "sd": lambda model: model.register_state_dict_post_hook(lambda *a: None),
    "optstep": lambda model: None,
}

for k, r in HK.items():
    if k == "optstep":
        continue
    for w in ("in", "out", "step", "between"):
        add("steps", f"hook-{k}-{w}", hook(r, w))


@case("steps", "hook-optimizer")
def hook_optimizer(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    optimizer.register_step_post_hook(
        lambda optimizer, a, k: [p.data.mul_(0.9) for g in optimizer.param_groups for p in g["params"]] and None
    )
    optimizer.register_step_pre_hook(
        lambda optimizer, a, k: [p.grad.mul_(0.5) for g in optimizer.param_groups for p in g["params"]] and None
    )
    run.go(plain(run, model, optimizer))
    return run.result(model)


@case("steps", "hook-activations-dict")
def hook_activations_dict(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
        acts = {}
        model.a.register_forward_hook(lambda self, i, out: acts.__setitem__("a", out))

    def loss(x, y):
        return F.mse_loss(model(x), y) + acts["a"].pow(2).mean()

    run.go(plain(run, model, optimizer, loss))
    return run.result(model)


@case("steps", "hook-opt-in-backward", refused="was called while backward.. is under way")
def hook_opt_in_backward(run):
    with run.scope():
        model = Net()
        os_ = [optim.SGD([p], lr=0.1) for p in model.parameters()]
    for p, q in zip(model.parameters(), os_, strict=False):
        p.register_post_accumulate_grad_hook(lambda p, q=q: (q.step(), q.zero_grad(), None)[-1])

    def step(i):
        x, y = run.xy(i)
        F.mse_loss(model(x), y).backward()

    run.go(step)
    return run.result(model)


@case("steps", "func-functional_call")
def func_functional_call(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def loss(x, y):
        return F.mse_loss(functional_call(model, {k: v * 1.5 for k, v in model.named_parameters()}, (x,)), y)

    run.go(plain(run, model, optimizer, loss))
    return run.result(model)


def fg(manual):

    def f(run):
        with run.scope():
            model = Net()
            optimizer = sgd(model)

        def step(i):
            x, y = run.xy(i)
            ps = dict(model.named_parameters())
            g = fgrad(lambda p: F.mse_loss(functional_call(model, p, (x,)), y))({k: v.detach() for k, v in ps.items()})
            if run.strategy:
                g = dict(zip(g, run.mean(list(g.values())), strict=False))
            if manual:
                with torch.no_grad():
                    for k, p in ps.items():
                        p.sub_(g[k], alpha=0.1)
            else:
                for k, p in ps.items():
                    p.grad = g[k]
                optimizer.step()

        run.go(step)
        return run.result(model)

    return f


add("steps", "func-grad-manual", fg(True))

add("steps", "func-grad-opt", fg(False))


@case("steps", "func-vmap-per-sample")
def func_vmap_per_sample(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        ps = {k: v.detach() for k, v in model.named_parameters()}
        g = vmap(fgrad(lambda p, x, y: F.mse_loss(functional_call(model, p, (x[None],)), y[None])), (None, 0, 0))(
            ps, x, y
        )
        optimizer.zero_grad()
        w = 1 / (1 + torch.stack([v.flatten(1).norm(dim=1) for v in g.values()]).norm(dim=0))
        sum((F.mse_loss(model(x), y, reduction="none").mean(1) * w.detach()).mean() for _ in range(1)).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "func-jacrev-penalty")
def func_jacrev_penalty(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def loss(x, y):
        J = vmap(jacrev(lambda x: model(x)))(x)
        return F.mse_loss(model(x), y) + 0.1 * J.pow(2).mean()

    run.go(plain(run, model, optimizer, loss))
    return run.result(model)


@case("steps", "func-ensemble")
def func_ensemble(run):
    with run.scope():
        ms = [Net() for _ in range(3)]
        optimizer = optim.SGD([p for model in ms for p in model.parameters()], lr=0.1)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        sum(F.mse_loss(model(x), y) for model in ms).backward()
        optimizer.step()

    run.go(step)
    P, _B = stack_module_state(ms)
    return {"P": P, "each": run.each(lambda: ms)}


@case("steps", "func-maml")
def func_maml(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        x2, y2 = run.xy(i + 20)
        ps = dict(model.named_parameters())
        optimizer.zero_grad()
        value = 0
        for k in range(x.shape[0]):
            g = torch.autograd.grad(
                F.mse_loss(functional_call(model, ps, (x[k : k + 1],)), y[k : k + 1]),
                list(ps.values()),
                create_graph=True,
            )
            value = (
                value
                + F.mse_loss(
                    functional_call(
                        model, {n: p - 0.1 * q for (n, p), q in zip(ps.items(), g, strict=False)}, (x2[k : k + 1],)
                    ),
                    y2[k : k + 1],
                )
                / x.shape[0]
            )
        value.backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


class Ck(nn.Module):
    def __init__(self, **k):
        super().__init__()
        self.a, self.b, self.k = (nn.Linear(6, 16), nn.Linear(16, 3), k)

    def forward(self, x):
        x = x.requires_grad_(True) if self.k["use_reentrant"] else x
        return checkpoint(self.b, checkpoint(lambda z: torch.tanh(self.a(z)), x, **self.k), **self.k)


for r in (True, False):
    add("steps", f"ckpt-{('re' if r else 'non')}", trains(lambda r=r: Ck(use_reentrant=r)))


class CkS(nn.Module):
    def __init__(self, r):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.r = r
        self.n = 0

    def forward(self, x):
        self.n += 1
        return checkpoint_sequential(self.q, 2, x.clone().requires_grad_(True), use_reentrant=self.r)


for r in (True, False):
    add("steps", f"ckpt-seq-{('re' if r else 'non')}", trains(lambda r=r: CkS(r)))


def ckd(run, r):
    with run.scope():
        model = CkD(r)
        optimizer = sgd(model)
    run.strategy.seed_replicas(3)
    run.go(plain(run, model, optimizer))
    return run.result(model)


class CkD(nn.Module):
    def __init__(self, r):
        super().__init__()
        self.a, self.d, self.b, self.r = (nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3), r)

    def forward(self, x):
        return self.b(
            checkpoint(lambda z: self.d(torch.tanh(self.a(z))), x.clone().requires_grad_(True), use_reentrant=self.r)
        )


for r in (True, False):
    add("steps", f"ckpt-dropout-{('re' if r else 'non')}", lambda run, r=r: ckd(run, r), reference="ranks")


def gp(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def loss(x, y):
        x = x.clone().requires_grad_(True)
        p = model(x)
        (g,) = torch.autograd.grad(p.sum(), x, create_graph=True)
        return F.mse_loss(p, y) + (g.norm(dim=1) - 1).pow(2).mean()

    run.go(plain(run, model, optimizer, loss))
    return run.result(model)


add("steps", "2nd-gradient-penalty", gp)


@case("steps", "2nd-hessian-vector", tolerance=1e-08)
def second_hessian_vector(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward(create_graph=True)
        gs = [p.grad for p in model.parameters()]
        v = [torch.ones_like(g) for g in gs]
        h = torch.autograd.grad(gs, list(model.parameters()), v, retain_graph=False)
        if run.strategy:
            h = run.mean(list(h))
        for p, q in zip(model.parameters(), h, strict=False):
            p.grad = p.grad.detach() / (1 + q.abs())
        optimizer.step()
        optimizer.zero_grad()

    run.go(step, 4)
    return run.result(model)


@case("steps", "2nd-gradnorm-backward")
def second_gradnorm_backward(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward(create_graph=True)
        n = sum(p.grad.pow(2).sum() for p in model.parameters())
        optimizer.zero_grad()
        n.backward()
        optimizer.step()
        optimizer.zero_grad()

    run.go(step, 4)
    return run.result(model)


@case("steps", "agrad-manual-reduced")
def agrad_manual_reduced(run):
    with run.scope():
        model = Net()

    def step(i):
        x, y = run.xy(i)
        g = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        if run.strategy:
            g = run.mean(list(g))
        with torch.no_grad():
            for p, q in zip(model.parameters(), g, strict=False):
                p -= 0.1 * q

    run.go(step)
    return run.result(model)
