"""What modules keep: attributes, buffers, batch statistics, hidden states."""

from __future__ import annotations

import collections

import torch
from programs import Net, Run, add, case, plain, sgd, trains
from torch import nn
from torch.nn import functional as F


class Stash(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 8)
        self.o = nn.Linear(8, 3)
        self.h = None

    def forward(self, x):
        self.h = self.l(x)
        self.aux = self.h.pow(2).mean()
        return self.o(torch.tanh(self.h))


add("steps", "attr-auxloss", trains(Stash, loss=lambda model, x, y: F.mse_loss(model(x), y) + model.aux))


class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.l(x) / self.calls


@case("steps", "attr-counter")
def attr_counter(run):
    with run.scope():
        model = Count()
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer))
    return run.result(model, n=model.calls, ne=run.each(lambda: model.calls))


class Rebind(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 3)
        self.register_buffer("k", torch.zeros(()))
        self.register_buffer("m", torch.zeros(3))

    def forward(self, x):
        self.k = self.k + 1
        y = self.l(x)
        return y / self.k


add("steps", "attr-rebound-buffer", trains(Rebind))


class Inplace(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 3)
        self.register_buffer("k", torch.zeros(()))

    def forward(self, x):
        self.k += 1
        return self.l(x) / self.k


add("steps", "attr-inplace-buffer", trains(Inplace))


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 3)
        self.hist = []
        self.d = {}
        self.q = collections.deque(maxlen=3)
        self.t = {"a": [0]}

    def forward(self, x):
        y = self.l(x)
        self.hist.append(len(self.hist))
        self.d[len(self.hist)] = len(self.d)
        self.q.append(len(self.hist))
        self.t["a"][0] += 1
        return y / (1 + len(self.hist) + sum(self.q) + self.t["a"][0])


@case("steps", "attr-containers")
def attr_containers(run):
    with run.scope():
        model = Lists()
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer))
    return run.result(
        model,
        h=model.hist,
        d=model.d,
        q=list(model.q),
        t=model.t,
        he=run.each(lambda: [model.hist, model.d, list(model.q), model.t]),
    )


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.GRUCell(6, 8)
        self.o = nn.Linear(8, 3)
        self.h = None

    def forward(self, x):
        self.h = self.c(x, self.h)
        return self.o(self.h)

    def detach(self):
        self.h = self.h.detach()


@case("steps", "attr-hidden-detach")
def attr_hidden_detach(run):
    with run.scope():
        model = Hidden()
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer, extra=lambda i: model.detach()))
    return run.result(model)


@case("steps", "attr-hidden-bptt")
def attr_hidden_bptt(run):
    with run.scope():
        model = Hidden()
        optimizer = sgd(model)

    def step(i):
        model.h = None
        optimizer.zero_grad()
        value = 0
        for k in range(3):
            x, y = run.xy(10 * i + k)
            value = value + F.mse_loss(model(x), y)
        value.backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 3)
        self.cache = {}

    def forward(self, x):
        if "w" not in self.cache:
            self.cache["w"] = self.l.weight * 2
        return F.linear(x, self.cache["w"], self.l.bias)

    def reset(self):
        self.cache.clear()


@case("steps", "attr-weight-cache")
def attr_weight_cache(run):
    with run.scope():
        model = Cache()
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer, extra=lambda i: model.reset()))
    return run.result(model)


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(6, 4)
        self.e = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))
        self.losses = []

    def forward(self, x):
        p = self.g(x).softmax(-1)
        self.losses.append(p.pow(2).sum(-1).mean())
        return sum((p[:, i : i + 1] * e(x) for i, e in enumerate(self.e)))


@case("steps", "attr-loss-list")
def attr_loss_list(run):
    with run.scope():
        model = Moe()
        optimizer = sgd(model)

    def loss(x, y):
        model.losses.clear()
        value = F.mse_loss(model(x), y)
        return value + 0.1 * sum(model.losses)

    run.go(plain(run, model, optimizer, loss))
    return run.result(model)


@case("steps", "attr-plain-tensors")
def attr_plain_tensors(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
        model.scale = torch.ones(())
        model.w = [torch.ones(3), {"k": torch.zeros(2)}]

    def ex(i):
        model.scale = model.scale * 0.9
        model.w[0].mul_(0.5)
        model.w[1]["k"] += 1
        model.newattr = i

    def loss(x, y):
        return F.mse_loss(model(x) * model.scale + model.w[0], y)

    run.go(plain(run, model, optimizer, loss, ex))
    return run.result(
        model, s=model.scale, w=model.w, a=model.newattr, se=run.each(lambda: [model.scale, model.w, model.newattr])
    )


@case("steps", "attr-set-between-runs")
def attr_set_between_runs(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 2)
    model.gain = 2.0
    model.opts = {"a": [1.0, 2.0]}
    model.buf = torch.ones(3)

    def loss(x, y):
        return F.mse_loss(model(x) * model.gain * model.opts["a"][1] + model.buf, y)

    train = plain(run, model, optimizer, loss)
    run.go(train, 2)
    model.gain = 0.5
    model.opts["a"][1] = 0.3
    model.buf += 1
    run.go(train, 2)
    model.buf = torch.zeros(3)
    del model.opts["a"][0]
    model.opts["a"].append(7.0)
    run.go(train, 2)
    return run.result(model)


class BN(nn.Module):
    def __init__(self, k=nn.BatchNorm1d):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.n = k(8)
        self.b = nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.n(self.a(x)).relu())


add("steps", "bn-each-rank", trains(BN, result=Run.result_with_own_buffers), reference="ranks")

add("steps", "bn-sync", trains(lambda: BN(nn.SyncBatchNorm)))

add("steps", "bn-convert-sync", trains(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(BN())))


@case("steps", "bn-train-eval", reference="ranks")
def bn_train_eval(run):
    with run.scope():
        model = BN()
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 3)
    model.eval()
    run.go(plain(run, model, optimizer), 3)
    model.train()
    run.go(plain(run, model, optimizer), 2)
    return run.result_with_own_buffers(model)


@case("steps", "bn-train-eval-in-step", reference="ranks")
def bn_train_eval_in_step(run):
    with run.scope():
        model = BN()
        optimizer = sgd(model)

    def step(i):
        model.train()
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(x)

    run.go(step, 5)
    return run.result_with_own_buffers(model)
