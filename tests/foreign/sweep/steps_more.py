"""Larger algorithms, weak references, copies, threads, iterators."""

from __future__ import annotations

import copy
import io
import threading
import weakref

import torch
from programs import Net, case, plain, random, sgd
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

import tfstyle_dist as tfd


@case("steps", "rollback-in-step")
def rollback_in_step(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    snap = {}

    def step(i):
        x, y = run.xy(i)
        if i % 3 == 0:
            snap["m"] = {k: v.clone() for k, v in model.state_dict().items()}
            snap["o"] = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if i % 3 == 1:
            model.load_state_dict(snap["m"])
            optimizer.load_state_dict(snap["o"])

    run.go(step, 8)
    return run.result(model)


@case("steps", "svrg")
def svrg(run):
    with run.scope():
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        ref = copy.deepcopy(model)
        mu = [torch.zeros_like(p) for p in model.parameters()]

    def step(i):
        x, y = run.xy(i)
        if i % 3 == 0:
            ref.load_state_dict(model.state_dict())
            ref.zero_grad()
            F.mse_loss(ref(x), y).backward()
            for u, p in zip(mu, ref.parameters(), strict=False):
                u.copy_(p.grad)
        ref.zero_grad()
        F.mse_loss(ref(x), y).backward()
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for p, q, u in zip(model.parameters(), ref.parameters(), mu, strict=False):
            p.grad += u - q.grad
        optimizer.step()

    run.go(step)
    return run.result(model, ref)


class ByHand:
    """An optimizer that is no torch.optim.Optimizer."""

    def __init__(self, params):
        self.params = list(params)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p in self.params:
            p.sub_(p.grad, alpha=0.1)


class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Linear(6, 4)
        self.d = nn.Linear(4, 3)
        self.register_buffer("cb", torch.randn(5, 4))
        self.register_buffer("n", torch.ones(5))
        self.register_buffer("avg", self.cb.clone())

    def forward(self, x):
        z = self.e(x)
        i = torch.cdist(z, self.cb).argmin(1)
        oh = F.one_hot(i, 5).to(z.dtype)
        cnt, sm = (oh.sum(0), oh.t() @ z.detach())
        if self.E.strategy:
            cnt, sm = tfd.get_replica_context().all_reduce("sum", [cnt, sm])
        if self.training:
            self.n.mul_(0.9).add_(cnt, alpha=0.1)
            self.avg = self.avg * 0.9 + sm * 0.1
            self.cb.data.copy_(self.avg / self.n[:, None])
        q = self.cb[i]
        return (self.d(z + (q - z).detach()), F.mse_loss(z, q.detach()))


@case("steps", "vq-ema-all_reduce")
def vq_ema_all_reduce(run):
    VQ.E = run
    with run.scope():
        model = VQ()
        optimizer = sgd(model)

    def loss(x, y):
        p, value = model(x)
        return F.mse_loss(p, y) + value

    run.go(plain(run, model, optimizer, loss))
    return run.result(model)


@case("steps", "all_reduce-mid-forward")
def all_reduce_mid_forward(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        p = model(x)
        mu = p.mean(0)
        if run.strategy:
            mu = run.mean(mu)
        optimizer.zero_grad()
        F.mse_loss(p - mu.detach(), y).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "all_gather-contrastive")
def all_gather_contrastive(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        p = model(x)
        if run.strategy:
            P, Y = (tfd.get_replica_context().all_gather(p, 0), tfd.get_replica_context().all_gather(y, 0))
        else:
            P, Y = (p, y)
        optimizer.zero_grad()
        F.cross_entropy(P @ Y.t(), torch.arange(8)).backward()
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "returns-nested")
def returns_nested(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        return {"loss": F.mse_loss(model(x), y).detach(), "n": [torch.ones(()), 3]}

    run.go(step)
    return run.result(model)


@case("steps", "weakref-parameter")
def weakref_parameter(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    wr = weakref.ref(model.a.weight)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        assert wr() is model.a.weight

    run.go(step)
    return run.result(model)


@case("steps", "param-keyed-dict")
def param_keyed_dict(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    d = weakref.WeakKeyDictionary()
    d[model] = 1
    e = {p: i for i, p in enumerate(model.parameters())}
    ids = {id(p) for p in model.parameters()}

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        assert all(p in e and id(p) in ids for p in model.parameters())
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "weak-tensor-key-dict")
def weak_tensor_key_dict(run):

    with run.scope():
        model = Net()
        optimizer = sgd(model)
    d = WeakTensorKeyDictionary()
    [d.__setitem__(p, torch.zeros_like(p)) for p in model.parameters()]

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        assert all(p in d for p in model.parameters())
        optimizer.step()

    run.go(step)
    return run.result(model)


@case("steps", "deepcopy-save-outside")
def deepcopy_save_outside(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 3)
    second_model = copy.deepcopy(model)
    b = io.BytesIO()
    torch.save(model, b)
    b.seek(0)
    third_model = torch.load(b, weights_only=False)
    run.go(plain(run, model, optimizer), 3)
    return run.result(model, m2=second_model, m3=third_model)


@case("steps", "deepcopy-then-train-both")
def deepcopy_then_train_both(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    run.go(plain(run, model, optimizer), 3)
    with run.scope():
        second_model = copy.deepcopy(model)
        second_optimizer = sgd(second_model)
    run.go(plain(run, second_model, second_optimizer), 3)
    run.go(plain(run, model, optimizer), 3)
    return run.result(model, second_model)


@case("steps", "train-outside-and-inside")
def train_outside_and_inside(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    train = plain(run, model, optimizer)
    for i in range(3):
        run.run(train, i)
        value = model(random(3, 8, 6)).pow(2).mean()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return run.result(model)


@case("steps", "run-in-a-thread")
def run_in_a_thread(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def th():
        for i in range(6):
            run.run(plain(run, model, optimizer), i)

    t = threading.Thread(target=th)
    t.start()
    t.join()
    return run.result(model)
