"""Gradients over several passes, and steps of an optimizer outside of ``run``."""

from __future__ import annotations

from programs import Net, add, case, sgd
from torch.nn import functional as F


def accum(zero):

    def f(run):
        with run.scope():
            model = Net()
            optimizer = sgd(model)

        def step(i):
            optimizer.zero_grad(set_to_none=zero)
            for k in range(3):
                x, y = run.xy(10 * i + k)
                (F.mse_loss(model(x), y) / 3).backward()
            optimizer.step()

        run.go(step)
        return run.result(model)

    return f


add("steps", "accum-none", accum(True))

add("steps", "accum-zero", accum(False))


@case("steps", "accum-over-runs")
def accum_over_runs(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def micro(i):
        x, y = run.xy(i)
        (F.mse_loss(model(x), y) / 3).backward()

    def upd():
        optimizer.step()
        optimizer.zero_grad()

    for i in range(4):
        for k in range(3):
            run.run(micro, 10 * i + k)
        run.run(upd)
    return run.result(model)


@case("steps", "accum-conditional")
def accum_conditional(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        (F.mse_loss(model(x), y) / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    run.go(step, 9)
    return run.result(model)


@case("steps", "step-outside-run")
def step_outside_run(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        F.mse_loss(model(x), y).backward()

    for i in range(6):
        run.run(step, i)
        optimizer.step()
        optimizer.zero_grad()
    return run.result(model)


@case("steps", "grads-edited-outside")
def grads_edited_outside(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        F.mse_loss(model(x), y).backward()

    def s2():
        optimizer.step()

    for i in range(6):
        optimizer.zero_grad()
        run.run(step, i)
        for p in model.parameters():
            p.grad.mul_(0.5)
        model.a.bias.grad = model.a.bias.grad + 1
        run.run(s2)
    return run.result(model)
