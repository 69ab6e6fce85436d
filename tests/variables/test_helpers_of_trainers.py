"""What a trainer has besides its model and optimizer: counters, schedules, pools, callbacks, and what stays common."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from this_replica import replica
from torch import nn
from torch.utils.data import Dataset


class Helper:
    """Without anything that could be trained, and without tensors before the first step."""

    def __init__(self) -> None:
        self.count, self.seen, self.recent = 0, [], deque(maxlen=3)

    def note(self, x: torch.Tensor) -> None:
        self.count += 1
        self.seen = [*self.seen, x][-2:]
        self.recent.append(x)


class Trainer:
    def __init__(self, **others: Any) -> None:
        self.model = nn.Linear(1, 1)
        self.helper = Helper()
        self.__dict__.update(others)


def noted(strategy: Any, trainer: Trainer, helper: Any) -> list[tuple[int, list[float], list[float]]]:
    """What each replica has in a helper after three steps."""

    def step(number: int) -> tuple[int, list[float], list[float]]:
        assert trainer.model is not None
        helper.note(torch.tensor(10.0 * number + replica()))
        return helper.count, list(map(float, helper.seen)), list(map(float, helper.recent))

    for number in range(3):
        result = strategy.run(step, args=(number,))
    return list(strategy.experimental_local_results(result))


OWN = [(3, [10.0 + r, 20.0 + r], [0.0 + r, 10.0 + r, 20.0 + r]) for r in range(2)]


@pytest.mark.parametrize("knows_it", [False, True])
@pytest.mark.parametrize("where", ["attribute", "list", "object", "dict of objects"])
def test_the_helpers_of_a_trainer_are_each_replicas_own(strategy: Any, where: str, knows_it: bool) -> None:
    helper, middle = Helper(), Helper()
    middle.inner = helper  # type: ignore[attr-defined]
    with strategy.scope():
        trainer = Trainer(
            **{"attribute": {"helper": helper}, "list": {"callbacks": [helper]}, "object": {"handler": middle}}.get(
                where, {"hooks": {"a": middle}}
            )
        )
    if knows_it:
        helper.trainer = trainer  # type: ignore[attr-defined]
    assert noted(strategy, trainer, helper) == OWN
    helper.count = 10
    counts = strategy.experimental_local_results(strategy.run(lambda: (trainer.model, helper.count)[1]))
    assert counts in ((10,), (10, 10))  # one value where it is the same object


class Data(Dataset[int]):
    note, count = Helper.note, 0

    def __init__(self) -> None:
        Helper.__init__(self)  # type: ignore[arg-type]


COMMON: dict[str, Any] = {"array": lambda: np.zeros(2000), "lock": threading.Lock, "thread": threading.Event}


@pytest.mark.parametrize("kind", [*COMMON, "data"])
def test_what_has_long_arrays_or_threads_or_data_stays_one_for_all(strategy: Any, kind: str) -> None:
    """Replicas with counters of their own would write to each other's entries of an array."""
    helper = Data() if kind == "data" else Helper()
    if kind != "data":
        helper.inside = COMMON[kind]()  # type: ignore[union-attr]
    with strategy.scope():
        trainer = Trainer(helper=helper)
    counts: list[int] = []

    def step() -> None:
        assert trainer.model is not None
        helper.count += 1
        counts.append(helper.count)

    for _ in range(2):
        strategy.run(step)
    assert counts == [1, 2, 3, 4]


@pytest.mark.parametrize("depth", range(1, 7))
def test_objects_that_lie_around_a_module_are_found(strategy: Any, depth: int) -> None:
    with strategy.scope():
        thing: Any = nn.Linear(1, 1)
    for _ in range(depth):
        outer = Helper()
        outer.inner, thing = thing, outer  # type: ignore[attr-defined]

    def step() -> int:
        thing.count += 1
        return thing.count

    for _ in range(3):
        counts = strategy.experimental_local_results(strategy.run(step))
    assert counts in ((3,), (3, 3))


@pytest.mark.parametrize("named", ["object", "in a list", "method"])
def test_an_object_of_numbers_that_a_step_names(strategy: Any, named: str) -> None:
    """Each replica has its own from the first run on, also if it has tensors later."""
    with strategy.scope():
        trainer = Trainer()
    helper, helpers = Helper(), [Helper()]
    note = helper.note

    def step(number: int) -> tuple[int, str]:
        assert trainer.model is not None
        x = torch.tensor(10.0 * number + replica())
        used = helpers[0] if named == "in a list" else helper
        note(x) if named == "method" else used.note(x)
        return used.count, repr(list(map(float, used.recent)))

    for number in range(3):
        result = strategy.run(step, args=(number,))
        assert strategy.experimental_local_results(result) == tuple(
            (number + 1, repr([10.0 * before + r for before in range(number + 1)])) for r in range(2)
        )


class Callback:
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = weakref.ref(trainer)

    def end(self, x: torch.Tensor) -> None:
        trainer = self.trainer()
        assert trainer is not None
        trainer.helper.note(x)


def test_a_trainer_that_only_a_weak_reference_names(strategy: Any) -> None:
    with strategy.scope():
        trainer = Trainer()
    callback = Callback(trainer)

    def step(number: int) -> int:
        callback.end(torch.tensor(10.0 * number + replica()))
        return trainer_of(callback).helper.count

    for number in range(3):
        counts = strategy.experimental_local_results(strategy.run(step, args=(number,)))
    assert counts in ((3,), (3, 3))


def trainer_of(callback: Callback) -> Trainer:
    trainer = callback.trainer()
    assert trainer is not None
    return trainer


class Watched:
    """What watches a model, or a trainer, without keeping it."""

    def __init__(self, watched: Any) -> None:
        self.watched, self.count = weakref.proxy(watched), 0

    def end(self, x: torch.Tensor) -> None:
        self.count += 1
        self.watched.helper.note(x)


@pytest.mark.parametrize("named", ["model", "trainer"])
@pytest.mark.parametrize("kept", ["closure", "module", "optimizer"])
def test_what_a_proxy_names(strategy: Any, named: str, kept: str) -> None:
    with strategy.scope():
        trainer = Trainer()
        assert trainer.model is not None
        trainer.model.helper = Helper()
        watch = Watched(trainer.model if named == "model" else trainer)
        owner = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.1)
        if kept != "closure":
            (owner if kept == "module" else optimizer).watch = watch  # type: ignore[union-attr]

    def step(number: int) -> tuple[int, int, int]:
        found: Any = {"closure": lambda: watch, "module": lambda: owner.watch, "optimizer": lambda: optimizer.watch}
        found[kept]().end(torch.tensor(10.0 * number + replica()))
        owner(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert trainer.model is not None
        return watch.count, len(watch.watched.helper.seen), watch.watched.helper.count

    for number in range(3):
        counts = strategy.experimental_local_results(strategy.run(step, args=(number,)))
        assert set(counts) == {(number + 1, min(number + 1, 2), number + 1)}


def test_a_proxy_of_what_is_gone(strategy: Any) -> None:
    with strategy.scope():
        model, gone = nn.Linear(1, 1), nn.Linear(1, 1)
        model.helper, proxy = Watched(gone), weakref.proxy(gone)
    del gone

    def step(unused: Any = proxy) -> float:
        model(torch.ones(1, 1)).sum().backward()
        return float(model.bias.grad)

    for number in range(2):
        assert set(strategy.experimental_local_results(strategy.run(step))) == {number + 1.0}
