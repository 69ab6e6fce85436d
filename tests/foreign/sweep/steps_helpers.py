"""Steps whose helpers keep state, and where programs keep the helpers: in hooks, methods, callbacks and lists."""

from __future__ import annotations

import abc
import collections
import copy
import enum
import functools
import math
import types
from typing import Generic, TypeVar

import torch
from programs import WITHOUT_SERVERS, Net, case, random, sgd
from torch import nn
from torch.nn import functional as F


def helped(name, **options):
    return case("steps", name, forms=options.pop("forms", WITHOUT_SERVERS), **options)


def fit(run, model, optimizer, before=None, after=None, loss=None, count=6):
    def step(i):
        x, y = run.xy(i)
        if before:
            before(i)
        optimizer.zero_grad()
        (loss(x, y) if loss else F.mse_loss(model(x), y)).backward()
        optimizer.step()
        if after:
            after(i)

    run.go(step, count)


class Schedule:
    def __init__(self):
        self.count = 0

    def value(self, *_):
        self.count += 1
        return 1 / self.count


# ---- helpers that functions alone name ----------------------------------------------------------------------------


def _closure(model):
    schedule = Schedule()
    model.a.register_forward_hook(lambda module, inputs, output: output * schedule.value())


def _method(model):
    class Scale(Schedule):
        def hook(self, module, inputs, output):
            return output * self.value()

    model.a.register_forward_hook(Scale().hook)


def _partial(model):
    def hook(schedule, module, inputs):
        return (inputs[0] * schedule.value(),)

    model.a.register_forward_pre_hook(functools.partial(hook, Schedule()))


def _of_gradients(model):
    for parameter in model.parameters():
        one = Schedule()
        parameter.register_hook(lambda gradient, *, schedule=one: gradient * schedule.value())


def _object_of_gradients(model):
    class Scale(Schedule):
        def __call__(self, gradient):
            return gradient * self.value()

    for parameter in model.parameters():
        parameter.register_hook(Scale())


def _accumulated(model):
    def attach(parameter):
        schedule = Schedule()

        def hook(p):
            p.grad.mul_(schedule.value())

        parameter.register_post_accumulate_grad_hook(hook)

    for parameter in model.parameters():
        attach(parameter)


def _replaced_forward(model):
    forward, schedule = model.forward, Schedule()
    model.forward = lambda x: forward(x) * schedule.value()


def _bound_forward(model):
    model.forward = types.MethodType(lambda self, x: self.b(torch.tanh(self.a(x))) * self.scale(), model)
    model.scale = Schedule().value


def _power_iteration(model):
    def attach(module):
        kept = Schedule()
        kept.u = F.normalize(random(5, module.weight.shape[0]), dim=0)

        def normalized(_, inputs):
            with torch.no_grad():
                v = F.normalize(module.weight.T @ kept.u, dim=0)
                kept.u = F.normalize(module.weight @ v, dim=0)
            return (inputs[0] / (kept.u @ (module.weight @ v)),)

        module.register_forward_pre_hook(normalized)

    attach(model.a)
    attach(model.b)


for _attach in (_closure, _method, _partial, _of_gradients, _object_of_gradients, _accumulated, _replaced_forward,
                _bound_forward, _power_iteration):  # fmt: skip

    @helped(f"helper-of-a-hook-{_attach.__name__.strip('_').replace('_', '-')}")
    def hooked(run, attach=_attach):
        with run.scope():
            model = Net()
            optimizer = sgd(model, 0.02)
            attach(model)
        fit(run, model, optimizer)
        return run.result(model)


@helped("helper-that-the-function-of-a-rate-names")
def rate(run):
    def factor():
        schedule = Schedule()
        return lambda epoch: schedule.value() + 0.01 * epoch

    with run.scope():
        model = Net()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor())
    fit(run, model, optimizer, after=lambda i: scheduler.step())
    return run.result(model)


# ---- helpers that methods of classes name -------------------------------------------------------------------------


@helped("helper-that-forward-names")
def named_by_forward(run):
    schedule = Schedule()

    class Scaled(Net):
        def forward(self, x):
            return super().forward(x) * schedule.value()

    with run.scope():
        model = Scaled()
        optimizer = sgd(model)
    fit(run, model, optimizer)
    return run.result(model)


@helped("helper-that-the-step-of-an-optimizer-names")
def named_by_optimizer(run):
    schedule = Schedule()

    class Scheduled(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] = 0.1 * schedule.value()
            return super().step(closure)

    with run.scope():
        model = Net()
        optimizer = Scheduled(model.parameters(), lr=0.1)
    fit(run, model, optimizer)
    return run.result(model)


@helped("helper-that-an-autograd-function-names")
def named_by_function(run):
    schedule = Schedule()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * schedule.value()

    with run.scope():
        model = Net()
        optimizer = sgd(model)
    fit(run, model, optimizer, loss=lambda x, y: F.mse_loss(Scaled.apply(model(x)), y))
    return run.result(model)


@helped("helper-that-a-decorator-of-a-class-names")
def named_by_decorator(run):
    def scaled(kind):
        schedule, forward = Schedule(), kind.forward
        kind.forward = lambda self, x: forward(self, x) * schedule.value()
        return kind

    @scaled
    class Decorated(Net):
        def forward(self, x):
            return super().forward(x)

    with run.scope():
        model = Decorated()
        optimizer = sgd(model)
    fit(run, model, optimizer)
    return run.result(model)


# ---- lists of a class of their own --------------------------------------------------------------------------------


class Ring(list):
    def __init__(self, capacity):
        super().__init__()
        self.capacity, self.place, self.seen = capacity, 0, 0

    def push(self, value):
        if len(self) < self.capacity:
            self.append(value)
        else:
            self[self.place] = value
        self.place, self.seen = (self.place + 1) % self.capacity, self.seen + 1


@helped("ring-of-batches-of-a-trainer", reference="ranks", forms=("replicas", "ranks", "central"))
def ring(run):
    class Trainer:
        def __init__(self, model):
            self.model, self.optimizer, self.ring = model, sgd(model), Ring(3)

        def step(self, i):
            self.ring.push(run.xy(i))
            loss = sum(F.mse_loss(self.model(x), y) for x, y in self.ring) / len(self.ring)
            self.optimizer.zero_grad()
            (loss / (1 + 0.1 * self.ring.seen)).backward()
            self.optimizer.step()

    with run.scope():
        trainer = Trainer(Net())
    run.go(trainer.step)
    return run.result(trainer.model)


# ---- helpers of published programs --------------------------------------------------------------------------------


@helped("zeroth-order-in-inference-mode")
def zeroth_order(run):
    class MeZO:
        def __init__(self, model):
            self.model, self.steps = model, 0

        def move(self, by):
            generator = torch.Generator().manual_seed(self.steps)
            for p in self.model.parameters():
                p.data = p.data + by * torch.randn(p.shape, generator=generator, device="cpu").to(p)

        def step(self, loss):
            self.steps += 1
            with torch.inference_mode():
                self.move(0.01)
                above = loss()
                self.move(-0.02)
                slope = run.mean((above - loss()).clone() / 0.02).item()
                self.move(0.01)
            with torch.no_grad():
                self.move(-0.05 * slope)

    with run.scope():
        model = Net()
        mezo = MeZO(model)

    def step(i):
        x, y = run.xy(i)
        mezo.step(lambda: F.mse_loss(model(x), y))

    run.go(step)
    return run.result(model)


@helped("events-of-an-engine")
def engine(run):
    Events = enum.Enum("Events", ["DONE"])

    class State:
        def __init__(self):
            self.iteration, self.metrics = 0, {"weight": 1.0}

    class Engine:
        def __init__(self, update):
            self.update, self.handlers, self.state = update, collections.defaultdict(list), State()

        def on(self, event, every):
            return lambda handler: self.handlers[event].append((handler, every))

        def __call__(self, batch):
            self.state.iteration += 1
            self.update(self, batch)
            for handler, every in self.handlers[Events.DONE]:
                if self.state.iteration % every == 0:
                    handler(self)

    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) * engine.state.metrics["weight"]).backward()
        optimizer.step()

    trainer = Engine(update)

    @trainer.on(Events.DONE, every=2)
    def reweigh(engine):
        engine.state.metrics["weight"] *= 0.7

    run.go(lambda i: trainer(run.xy(i)))
    return run.result(model)


@helped("generic-schedule-that-is-false")
def generic(run):
    T = TypeVar("T")

    class Base(abc.ABC, Generic[T]):
        def __init__(self):
            self.t = 0

        @abc.abstractmethod
        def value(self): ...

        def __next__(self):
            self.t += 1
            return self.value()

        def __len__(self):
            return 0

    class Inverse(Base[float]):
        def value(self):
            return 0.1 / self.t

    with run.scope():
        model = Net()
        optimizer = sgd(model)
    rates = Inverse()
    fit(run, model, optimizer, before=lambda i: optimizer.param_groups[0].update(lr=next(rates)))
    return run.result(model)


@helped("consistency-model-with-a-schedule-of-its-teacher")
def consistency(run):
    class Consistency:
        def __init__(self, model):
            self.model, self.teacher, self.k = model, copy.deepcopy(model).requires_grad_(False), 0

        @property
        def levels(self):
            return math.ceil(math.sqrt(self.k / 6 * 32 + 4) - 1) + 1

        def loss(self, x, noise):
            sigma, k = torch.linspace(0.1, 2, self.levels), self.k % (self.levels - 1)
            with torch.no_grad():
                aim = self.teacher(x + noise * sigma[k])
            return F.mse_loss(self.model(x + noise * sigma[k + 1]), aim)

        @torch.no_grad()
        def update(self):
            self.k += 1
            keep = math.exp(2 * math.log(0.9) / self.levels)
            for p, t in zip(self.model.parameters(), self.teacher.parameters(), strict=True):
                t.mul_(keep).add_(p, alpha=1 - keep)

    with run.scope():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        trained, optimizer = Consistency(model), torch.optim.RAdam(model.parameters(), 0.01)
    fit(run, model, optimizer, after=lambda i: trained.update(), loss=lambda x, y: trained.loss(x, torch.tanh(x)))
    return run.result(model, trained.teacher)
