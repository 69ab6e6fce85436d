"""Steps with torch.compile, in modes of torch, and with random numbers."""

from __future__ import annotations

import torch
from programs import Net, Run, add, case, flat, plain, sgd
from torch import nn, optim
from torch.nn import functional as F

import tfstyle_dist as tfd


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
