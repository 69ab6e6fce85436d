"""Ways to call backward, and exceptions."""

from __future__ import annotations

import contextlib

import torch
from programs import Net, case, sgd
from torch import nn, optim
from torch.autograd import backward
from torch.nn import functional as F


@case("steps", "backward-twice-retain")
def backward_twice_retain(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        value = F.mse_loss(model(x), y)
        value.backward(retain_graph=True)
        value.backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "backward-autograd-list")
def backward_autograd_list(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        p = model(x)
        torch.autograd.backward([F.mse_loss(p, y), p.pow(2).mean()])
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "backward-inputs")
def backward_inputs(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        p = model(x)
        p.backward(gradient=(p - y).detach() / p.numel())
        optimizer.step()

    def step1(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        p = model(x)
        p.backward(gradient=(p - y).detach() / p.numel(), inputs=list(model.a.parameters()))
        optimizer.step()

    run.go(step, 3)
    run.go(step1, 3)
    return run.result(model)


@case("steps", "backward-imported-after")
def backward_imported_after(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    from torch.autograd import backward as bw2

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        bw2(F.mse_loss(model(x), y))
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "backward-imported-early")
def backward_imported_early(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        backward(  # imported before any strategy was made
            F.mse_loss(model(x), y)
        )
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "pcgrad-by-hand")
def pcgrad_by_hand(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        g1 = []
        F.mse_loss(model(x), y).backward()
        g1 = [p.grad.clone() for p in model.parameters()]
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        g2 = [p.grad.clone() for p in model.parameters()]
        for p, a, b in zip(model.parameters(), g1, g2, strict=False):
            d = (a * b).sum()
            p.grad = a + b if d >= 0 else a + b - d / a.norm() ** 2 * a
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "learned-loss-weights", refused="none of its parameters belongs to the strategy")
def learned_loss_weights(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
        ws = nn.Parameter(torch.ones(2))
        ow = optim.SGD([ws], lr=0.1)

    def step(i):
        x, y = run.xy(i)
        p = model(x)
        ls = [F.mse_loss(p, y), p.abs().mean()]
        optimizer.zero_grad()
        ow.zero_grad()
        (ws[0] * ls[0] + ws[1] * ls[1]).backward()
        optimizer.step()
        ow.step()
        with torch.no_grad():
            ws.clamp_(0.1, 2).mul_(2 / ws.sum())

    run.go(step)
    return {"m": model, "w": ws, "each": run.each(lambda: [model, ws])}


@case("steps", "exception-caught-in-step")
def exception_caught_in_step(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        try:
            if i == 2:
                raise ValueError("skip this batch")
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        except ValueError:
            pass
        with contextlib.suppress(RuntimeError):
            model(torch.zeros(2, 9))

    run.go(step)
    return run.result(model)


@case("steps", "exception-out-of-run")
def exception_out_of_run(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        value = F.mse_loss(model(x), y)
        if i == 2:
            raise ValueError("bad")
        value.backward()
        optimizer.step()

    for i in range(6):
        with contextlib.suppress(ValueError):
            run.run(step, i)
    return run.result(model)


@case("steps", "exception-after-backward")
def exception_after_backward(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if i == 2:
            with torch.no_grad():
                model.a.weight.add_(1)
            model.flag = 1
            raise ValueError("bad")
        optimizer.step()

    for i in range(6):
        with contextlib.suppress(ValueError):
            run.run(step, i)
    return run.result(model)


@case("steps", "exception-backward-second-time")
def exception_backward_second_time(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        try:
            value = F.mse_loss(model(x), y)
            value.backward()
            if i == 1:
                value.backward()
        except RuntimeError:  # backward a second time
            pass
        optimizer.step()

    run.go(step)
    return run.result(model)
