"""Steps whose helpers stand where a function leads to them over a class, a set or a weak method, or draw numbers."""

from __future__ import annotations

import functools
import random
import weakref
from collections import deque

import numpy as np
from programs import ALONE, Net, case, sgd
from steps_helpers import Schedule, fit, helped

OF_RANKS = {"reference": "ranks", "forms": ("replicas", "ranks", "central")}


def scaled(run, value):
    with run.scope():
        model = Net()
        optimizer = sgd(model)

    def loss(x, y):
        return ((model(x) - y) ** 2).mean() * value()

    fit(run, model, optimizer, loss=loss)
    return run.result(model)


CONTAINERS = {"set": lambda one: {one}, "frozen-set": lambda one: frozenset([one]), "deque": lambda one: deque([one])}

for _name, _make in CONTAINERS.items():

    @helped(f"helper-in-a-{_name}-that-the-step-names", forms=ALONE)
    def contained(run, make=_make):
        kept = make(Schedule())
        return scaled(run, lambda: next(iter(kept)).value())


@helped("helper-that-an-event-bus-refers-to-weakly", forms=ALONE)
def event_bus(run):
    class Bus:
        def __init__(self):
            self.methods = {"loss": [weakref.WeakMethod(schedule.value)]}

        def emit(self, name):
            return sum(method()() for method in self.methods[name])

    schedule = Schedule()
    bus = Bus()
    return scaled(run, lambda: bus.emit("loss"))


@helped("helper-that-is-the-only-one-of-its-class")
def only_one(run):
    class Only(Schedule):
        made = None

        @classmethod
        def get(cls):
            if cls.made is None:
                cls.made = cls()
            return cls.made

    Only.get()
    return scaled(run, lambda: Only.get().value())


@helped("helper-that-a-class-lists-as-a-plugin")
def plugins(run):
    class Plugin(Schedule):
        all: list[Schedule] = []  # noqa: RUF012

        def __init_subclass__(cls):
            Plugin.all.append(cls())

    class One(Plugin):
        pass

    return scaled(run, lambda: sum(plugin.value() for plugin in Plugin.all))


@helped("helper-that-decorates-the-step")
def decorates(run):
    class Counted(Schedule):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def __get__(self, trainer, kind):
            return self if trainer is None else functools.partial(self.function, trainer, self.value())

    class Trainer:
        def __init__(self):
            with run.scope():
                self.model = Net()
                self.optimizer = sgd(self.model)

        @Counted
        def step(self, scale, i):
            x, y = run.xy(i)
            self.optimizer.zero_grad()
            (((self.model(x) - y) ** 2).mean() * scale).backward()
            self.optimizer.step()

    trainer = Trainer()
    run.go(lambda i: trainer.step(i))
    return run.result(trainer.model)


GENERATORS = {
    "Python": (lambda: random.Random(3), lambda made: made.random()),
    "numpy": (lambda: np.random.default_rng(3), lambda made: float(made.random())),
    "old-numpy": (lambda: np.random.RandomState(3), lambda made: float(made.rand())),
}

for _name, _draw in GENERATORS.items():

    @case("steps", f"generator-of-{_name}-that-the-step-names", **OF_RANKS)
    def drawn(run, draw=_draw):
        generator = draw[0]()
        return scaled(run, lambda: draw[1](generator))
