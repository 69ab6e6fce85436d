"""Steps in threads, modes, generated weights and games of several models."""

from __future__ import annotations

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import torch
from programs import STEPS, Net, case, random, sgd
from steps_kept import fit
from torch import nn
from torch.nn import functional as F

# ---- how it is written and wrapped --------------------------------------------------------------------------------


@case("steps", "forward-in-a-thread-of-the-step")
def forward_in_thread(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    with ThreadPoolExecutor(1) as pool:

        def loss(x, y):
            return F.mse_loss(pool.submit(model, x).result(), y)

        return fit(run, model, optimizer, loss=loss)


@case(
    "steps",
    "backward-in-a-thread-of-the-step",
    refused=dict.fromkeys(("replicas", "central", "grouped", "elastic"), "would stay those of one replica"),
)
def backward_in_thread(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    with ThreadPoolExecutor(1) as pool:

        def step(i):
            x, y = run.xy(i)
            optimizer.zero_grad()
            pool.submit(lambda: F.mse_loss(model(x), y).backward()).result()
            optimizer.step()

        run.go(step)
        return run.result(model)


@dataclasses.dataclass(eq=False)
class _Data(nn.Module):
    width: int = 16
    calls: int = 0

    def __post_init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, self.width), nn.Linear(self.width, 3)

    def forward(self, x):
        self.calls += 1
        return self.b(torch.tanh(self.a(x))) / self.calls


@case("steps", "module-is-a-dataclass")
def module_is_dataclass(run):
    with run.scope():
        model = _Data()
        optimizer = sgd(model)
    return {**fit(run, model, optimizer), "calls": run.each(lambda: model.calls)}


class _Slotted(Net):
    __slots__ = ("kept",)

    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


@case("steps", "module-with-a-slot-that-is-read-at-once")
def module_with_slots(run):
    with run.scope():
        model = _Slotted()
        optimizer = sgd(model)
    return fit(run, model, optimizer, loss=lambda x, y: F.mse_loss((model(x), model.kept)[1], y))


class _Own:
    def __init__(self, parent):
        self.parent, self.weights = parent, [1.0]


class _Parent(Net):
    def __init__(self):
        super().__init__()
        self.own = _Own(self)
        self.a.__dict__["parent"] = self

    def forward(self, x):
        self.own.weights.append(0.9 * self.own.weights[-1])
        return super().forward(x) * self.a.parent.own.weights[-1]


@case("steps", "modules-that-know-each-other")
def cyclic(run):
    with run.scope():
        model = _Parent()
        optimizer = sgd(model)
    return fit(run, model, optimizer)


class _Cached(Net):
    @functools.cached_property
    def mask(self):
        return (torch.arange(16) % 2).to(self.a.weight.dtype)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)) * self.mask)


@case("steps", "cached-property")
def cached_property(run):
    with run.scope():
        model = _Cached()
        optimizer = sgd(model)
    return fit(run, model, optimizer)


@case("steps", "counts-operations")
def counts_operations(run):
    from torch.utils.flop_counter import FlopCounterMode

    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def step(i):
        x, y = run.xy(i)
        optimizer.zero_grad()
        with FlopCounterMode(display=False) as counter:
            F.mse_loss(model(x), y).backward()
        optimizer.step()
        return counter.get_total_flops() * run.replicas

    run.go(step)
    counted = run.local(run.run(step, STEPS))
    return {**run.result(model), "counted": float(counted[0])}


class _Mode(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.tanh:
            self.calls += 1
            return torch.sin(*args)
        return func(*args, **(kwargs or {}))


@case("steps", "function-mode")
def function_mode(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def loss(x, y):
        with _Mode():
            return F.mse_loss(model(x), y)

    return fit(run, model, optimizer, loss=loss)


@case("steps", "skip-init-and-selective-checkpoint")
def selective(run):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        kept = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    with run.scope():
        model = Net()
        model.a = nn.utils.skip_init(nn.Linear, 6, 16)
        with torch.no_grad():
            model.a.weight.fill_(0.1).add_(0.01 * random(1, 16, 6))
            model.a.bias.zero_()
        optimizer = sgd(model)
    make = functools.partial(create_selective_checkpoint_contexts, policy)

    def loss(x, y):
        return F.mse_loss(checkpoint(model, x, use_reentrant=False, context_fn=make), y)

    return fit(run, model, optimizer, loss=loss)


@case("steps", "save-on-cpu")
def save_on_cpu(run):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def loss(x, y):
        with torch.autograd.graph.save_on_cpu():
            return F.mse_loss(model(x), y)

    return fit(run, model, optimizer, loss=loss)


@case("steps", "hypernetwork")
def hypernetwork(run):
    with run.scope():
        inner = nn.Linear(6, 3).requires_grad_(False)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 21))
        optimizer = sgd(model, 0.02)

    def loss(x, y):
        flat = model(torch.ones_like(x[0]))
        made = {"weight": flat[:18].view(3, 6), "bias": flat[18:]}
        return F.mse_loss(torch.func.functional_call(inner, made, x), y)

    return fit(run, model, optimizer, loss=loss)


@case("steps", "policy-and-value-with-epochs")
def ppo(run):
    with run.scope():
        policy, value = Net(), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-5) for m in (policy, value)]

    def step(i):
        x = run.x(i)
        action, reward = run.ids(i, 3), run.x(i + 9, 1)[:, 0]
        with torch.no_grad():
            old = F.log_softmax(policy(x), -1).gather(1, action[:, None])[:, 0]
            advantage = reward - value(x)[:, 0]
        for _ in range(3):
            found = torch.distributions.Categorical(logits=policy(x))
            ratio = (found.log_prob(action) - old).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = -gain - 0.01 * found.entropy().mean() + 0.5 * F.mse_loss(value(x)[:, 0], reward)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for module in (policy, value):
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()

    run.go(step)
    return run.result(policy, value)


@case("steps", "temperature-of-no-module", refused="none of its parameters belongs to the strategy")
def sac(run):
    with run.scope():
        policy = Net()
        log_alpha = torch.zeros(1, requires_grad=True)
        optimizers = [torch.optim.Adam(policy.parameters(), lr=0.01), torch.optim.Adam([log_alpha], lr=0.01)]

    def step(i):
        entropy = torch.distributions.Categorical(logits=policy(run.x(i))).entropy().mean()
        for optimizer, loss in zip(
            optimizers, (-log_alpha.exp().detach() * entropy, log_alpha * entropy.detach()), strict=True
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run.go(step)
    return run.result(policy)


@case("steps", "spectral-gan-in-one-step")
def spectral_gan(run):
    spectral = nn.utils.parametrizations.spectral_norm
    with run.scope():
        g = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        d = nn.Sequential(spectral(nn.Linear(6, 8)), nn.LeakyReLU(0.2), spectral(nn.Linear(8, 1)))
        og, od = (torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.0, 0.9)) for m in (g, d))

    def step(i):
        real, noise = run.xy(i)[0], run.x(i + 30)
        for _ in range(2):
            od.zero_grad(set_to_none=True)
            (F.relu(1 - d(real)).mean() + F.relu(1 + d(g(noise).detach())).mean()).backward()
            od.step()
        og.zero_grad(set_to_none=True)
        (-d(g(noise)).mean()).backward()
        og.step()

    run.go(step)
    return run.result(g, d)


@case("steps", "features-through-forward-hooks")
def features(run):
    class Extractor:
        def __init__(self, model, names):
            self.model, self.found = model, {}
            for name in names:
                dict(model.named_modules())[name].register_forward_hook(functools.partial(self.keep, name))

        def keep(self, name, module, args, output):
            self.found[name] = output

    with run.scope():
        student, teacher = Net(), Net().eval().requires_grad_(False)
        pair = Extractor(student, ["a"]), Extractor(teacher, ["a"])
        optimizer = sgd(student)

    def loss(x, y):
        with torch.no_grad():
            teacher(x)
        return F.mse_loss(student(x), y) + sum(F.mse_loss(pair[0].found[n], pair[1].found[n]) for n in pair[0].found)

    return fit(run, student, optimizer, loss=loss)
