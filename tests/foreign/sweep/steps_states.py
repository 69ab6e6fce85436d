"""Steps that keep what they count in a dict, a namespace or a counter of collections."""

from __future__ import annotations

import argparse
import types
from collections import Counter, OrderedDict, defaultdict

import torch
from programs import WITHOUT_SERVERS, Net, Run, case, plain, sgd
from torch.nn import functional as F

OF_SHARES = {"reference": "ranks", "forms": ("replicas", "ranks", "central")}


def rated(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


def trained(run, state, step, **values):
    """Steps of ``state["model"]``."""
    run.go(step)
    return run.result(state["model"], **values)


# ---- a dict with the model and the optimizer ----------------------------------------------------------------------


def made(run, kind=dict, **others):
    with run.scope():
        model = Net()
        return kind(model=model, optimizer=sgd(model), **others)


@case("steps", "dict-of-state-warm-up", forms=WITHOUT_SERVERS)
def dict_warm_up(run):
    state = made(run, step=0)

    def step(i):
        state["step"] += 1
        rated(state["optimizer"], 0.2 * min(1.0, state["step"] / 4))
        x, y = run.xy(i)
        state["optimizer"].zero_grad()
        F.mse_loss(state["model"](x), y).backward()
        state["optimizer"].step()

    found = trained(run, state, step)
    return {**found, "steps": state["step"]}


@case("steps", "dict-of-state-bias-correction", forms=WITHOUT_SERVERS)
def dict_adam(run):
    with run.scope():
        model = Net()
    state = {"model": model, "t": 0, "m": [torch.zeros_like(p) for p in model.parameters()]}

    def step(i):
        x, y = run.xy(i)
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        state["t"] += 1
        with torch.no_grad():
            for p, m in zip(model.parameters(), state["m"], strict=True):
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(0.1 * m / (1 - 0.9 ** state["t"]))

    return trained(run, state, step)


@case("steps", "dict-of-state-that-changes-outside", forms=WITHOUT_SERVERS)
def dict_outside(run):
    state = made(run, OrderedDict, step=0, epoch=0, scale=1.0)

    def step(i):
        state["step"] += 1
        x, y = run.xy(i)
        state["optimizer"].zero_grad()
        (F.mse_loss(state["model"](x), y) * state["scale"] / state["step"]).backward()
        state["optimizer"].step()

    for epoch in range(3):
        state["epoch"], state["step"], state["scale"] = epoch, 0, 0.5**epoch
        for i in range(2):
            run.run(step, 2 * epoch + i)
    return run.result(state["model"], steps=state["step"])


@case("steps", "dict-of-state-gets-new-names", forms=WITHOUT_SERVERS)
def dict_new_names(run):
    state = made(run)

    def step(i):
        state.setdefault("first", float(i))
        state[f"seen_{i}"] = True
        state.pop(f"seen_{i - 2}", None)
        x, y = run.xy(i)
        state["optimizer"].zero_grad()
        (F.mse_loss(state["model"](x), y) * len(state)).backward()
        state["optimizer"].step()

    return trained(run, state, step, count=len(state))


@case("steps", "dict-of-nets-and-optimizers", forms=WITHOUT_SERVERS)
def dict_of_dicts(run):
    with run.scope():
        nets = {"one": Net(), "other": Net()}
        state = defaultdict(int)
        state.update(nets=nets, optimizers={name: sgd(net) for name, net in nets.items()})

    def step(i):
        x, y = run.xy(i)
        for name, optimizer in state["optimizers"].items():
            state["calls"] += 1
            optimizer.zero_grad()
            (F.mse_loss(state["nets"][name](x), y) / state["calls"]).backward()
            optimizer.step()

    run.go(step)
    return run.result(*nets.values(), calls=state["calls"])


@case("steps", "dict-of-state-iterated-over-backward", forms=WITHOUT_SERVERS)
def dict_iterated(run):
    with run.scope():
        model, other = Net(), Net()
        optimizers = {"a": sgd(model), "b": sgd(other)}
        nets = {"a": model, "b": other}

    def step(i):
        x, y = run.xy(i)
        for name, net in nets.items():
            optimizers[name].zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizers[name].step()
        if i == 2:
            nets["c"] = nets["a"]
            optimizers["c"] = optimizers["a"]

    run.go(step)
    return run.result(model, other)


@case("steps", "dict-of-state-best-loss", **OF_SHARES)
def dict_best(run):
    state = made(run, best=float("inf"), waited=0, losses=[])

    def step(i):
        x, y = run.xy(i)
        state["optimizer"].zero_grad()
        loss = F.mse_loss(state["model"](x), y)
        loss.backward()
        state["losses"].append(loss.item())
        if loss.item() < state["best"]:
            state["best"], state["waited"] = loss.item(), 0
        else:
            state["waited"] += 1
        state["optimizer"].step()
        return torch.tensor([state["best"], state["waited"], len(state["losses"])])

    run.go(step)
    return {"each": run.each(lambda: torch.tensor([state["best"], state["waited"], *state["losses"]]))}


# ---- namespaces ---------------------------------------------------------------------------------------------------


class Attributes(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Itself(dict):
    def __init__(self, **entries):
        super().__init__(entries)
        self.__dict__ = self


def _namespace(kind):
    def program(run: Run):
        with run.scope():
            model = Net()
            optimizer = sgd(model)
        state = kind(step=0, lr=0.2)

        def step(i):
            state.step += 1
            state.lr *= 0.9
            rated(optimizer, state.lr / state.step)
            x, y = run.xy(i)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

        run.go(step, 3)
        state.lr = 0.3
        run.go(step, 3)
        return run.result(model, step=state.step, lr=state.lr)

    return program


KINDS = {"simple": types.SimpleNamespace, "argparse": argparse.Namespace, "attributes": Attributes, "itself": Itself}
for _name, _kind in KINDS.items():
    case("steps", f"namespace-of-state-{_name}", forms=WITHOUT_SERVERS)(_namespace(_kind))


@case("steps", "namespace-that-is-an-argument", forms=WITHOUT_SERVERS)
def namespace_argument(run):
    state = made(run, types.SimpleNamespace, step=0, ema=None)

    def step(i, state):
        x, y = run.xy(i)
        state.optimizer.zero_grad()
        (F.mse_loss(state.model(x), y) * 0.9**state.step).backward()
        state.optimizer.step()
        state.step += 1
        weight = state.model.a.weight.detach()
        state.ema = weight.clone() if state.ema is None else state.ema.lerp(weight, 0.2)

    run.go(step, 6, state)
    return run.result(state.model, steps=state.step, ema=state.ema)


@case("steps", "namespace-with-the-model", forms=WITHOUT_SERVERS)
def namespace_with_model(run):
    state = made(run, types.SimpleNamespace, step=0, inner=types.SimpleNamespace(tau=1.0))

    def step(i):
        state.step += 1
        state.inner.tau *= 0.5
        x, y = run.xy(i)
        state.optimizer.zero_grad()
        (F.mse_loss(state.model(x), y) * (1 + state.inner.tau) / state.step).backward()
        state.optimizer.step()

    run.go(step)
    return run.result(state.model, step=state.step, tau=state.inner.tau)


@case("steps", "namespace-of-a-module", forms=WITHOUT_SERVERS)
def namespace_of_a_module(run):
    class Configured(Net):
        def __init__(self, config):
            super().__init__()
            self.config = config

        def forward(self, x):
            self.config.tau *= 0.9
            return super().forward(x) * self.config.tau

    with run.scope():
        model = Configured(argparse.Namespace(tau=1.0))
        optimizer = sgd(model)

    run.go(plain(run, model, optimizer))
    return run.result(model, tau=model.config.tau)


# ---- counters of collections --------------------------------------------------------------------------------------


@case("steps", "counter-of-a-module", forms=WITHOUT_SERVERS)
def counter_of_a_module(run):
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.calls = Counter()

        def forward(self, x):
            self.calls["forward"] += 1
            return super().forward(x) / self.calls["forward"]

    with run.scope():
        model = Counting()
        optimizer = sgd(model)

    run.go(plain(run, model, optimizer))
    return run.result(model, calls=model.calls["forward"])
