"""Ways to call backward, exceptions, torch.compile, modes, random numbers."""

from __future__ import annotations

import contextlib

import torch
from programs import Net, Run, add, case, flat, plain, sgd
from torch import nn, optim
from torch.autograd import backward
from torch.nn import functional as F

import tfstyle_dist as tfd


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


@case(
    "steps",
    "exception-after-backward",
    differs={"central": "a step that writes to parameters and then raises has written for each replica that ran"},
)
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


def comp(run, how="aot_eager"):
    with run.scope():
        model = Net()
        c = torch.compile(model, backend=how)
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(c(x), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


add("steps", "compile-aot_eager", comp, limit=150)

add("steps", "compile-eager", lambda run: comp(run, "eager"), limit=150)


@case("steps", "compile-in-place", limit=150)
def compile_in_place(run):
    with run.scope():
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
        model.compile(backend="aot_eager")
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer))
    return run.result(model)


@case("steps", "compile-loss-fn", limit=150)
def compile_loss_fn(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    @torch.compile(backend="aot_eager")
    def lf(x, y):
        return F.mse_loss(model(x), y)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        lf(x, y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "compile-opt-step", limit=200)
def compile_opt_step(run):
    with run.scope():
        model = Net()
        optimizer = optim.Adam(model.parameters(), lr=0.01)
    ostep = torch.compile(lambda: optimizer.step(), backend="aot_eager")

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        ostep()

    run.go(step, 4)
    return run.result(model)


@case("steps", "inference_mode")
def inference_mode(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        with torch.inference_mode():
            t = model(x)
        optimizer.zero_grad()
        F.mse_loss(model(x), y - 0.1 * t.clone()).backward()
        optimizer.step()

    run.go(step)

    def ev(i):
        return model(run.x(i)).mean()

    with torch.inference_mode():
        run.run(ev, 3)
    run.go(step, 2)
    return run.result(model)


@case("steps", "inference-tensor-kept")
def inference_tensor_kept(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    model.last = None

    def step(i):
        x, y = run.xy(i)
        with torch.inference_mode():
            model.last = model(x)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "no_grad-run")
def no_grad_run(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def ev(i):
        return model(run.x(i)).pow(2).mean()

    train = plain(run, model, optimizer)
    for i in range(4):
        run.run(train, i)
        with torch.no_grad():
            run.run(ev, i)
    return run.result(model)


@case("steps", "autocast-bf16", tolerance=0.03)
def autocast_bf16(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            p = model(x)
        F.mse_loss(p.double(), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "master-weights", refused="none of its parameters belongs to the strategy", tolerance=0.03)
def master_weights(run):
    with run.scope():
        model = Net().bfloat16()
        sgd(model)
        master = [p.detach().double().clone().requires_grad_() for p in model.parameters()]
        om = optim.SGD(master, lr=0.1)

    def step(i):
        x, y = run.xy(i)
        model.zero_grad()
        F.mse_loss(model(x.bfloat16()).double(), y).backward()
        for q, p in zip(master, model.parameters(), strict=False):
            q.grad = p.grad.double()
        om.step()
        with torch.no_grad():
            for q, p in zip(master, model.parameters(), strict=False):
                p.copy_(q)

    run.go(step)
    return run.result(model, ms=master)


def dropout(run, seed=False):
    with run.scope():
        model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))
        optimizer = sgd(model)
    if seed:
        run.strategy.seed_replicas(3)
    run.go(plain(run, model, optimizer))
    return run.result(model)


add("steps", "dropout-vs-ranks", lambda run: dropout(run, True), reference="ranks")


@case("steps", "dropout-twice-bitwise", forms=("replicas",))
def dropout_twice_bitwise(run):
    if not run.strategy:
        return "same"
    r = []
    for _ in range(2):
        torch.manual_seed(5)
        with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            r.append(flat(dropout(Run("replicas", strategy))["outside"]))
    return "same" if torch.equal(*r) else "differ"


@case("steps", "dropout-twice-same-strategy", forms=("replicas", "ranks", "central", "grouped"))
def dropout_twice_same_strategy(run):
    if not run.strategy:
        return "same"
    r = []
    for _ in range(2):
        torch.manual_seed(5)
        r.append(flat(dropout(run)["outside"]))
    return "same" if torch.equal(*r) else "differ"


@case("steps", "random-seeded-in-step")
def random_seeded_in_step(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    torch.manual_seed(3)

    def step(i):
        x, y = run.xy(i)
        torch.manual_seed(i)
        n = torch.randn(3)
        optimizer.zero_grad()
        F.mse_loss(model(x) + n, y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "random-own-generator")
def random_own_generator(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    g = torch.Generator().manual_seed(3)

    def step(i):
        x, y = run.xy(i)
        n = torch.randn(3, generator=g)
        optimizer.zero_grad()
        F.mse_loss(model(x) + n, y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)
