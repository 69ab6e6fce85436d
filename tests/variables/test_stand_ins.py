"""Attributes in ``__slots__``, and Python's mappings of a class of their own: each replica has its own of them."""

from __future__ import annotations

import threading
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import pytest
import torch
from this_replica import replica
from torch import nn
from until import wait_until_gone

import tfstyle_dist as td


@dataclass(slots=True)
class Progress:
    steps: int = 0
    seen: list[float] = field(default_factory=list)
    total: torch.Tensor = field(default_factory=lambda: torch.zeros(()))


class Best(Progress):
    __slots__ = ("__best", "best_of_all")

    def note(self, value: float) -> float:
        self.__best = max(value, getattr(self, "_Best__best", -1.0))
        return self.__best


class Trainer:
    def __init__(self, progress: Progress) -> None:
        self.model = nn.Linear(1, 1)
        self.progress = progress


@dataclass(slots=True)
class SlottedTrainer:
    model: nn.Module
    progress: Progress
    calls: int = 0


def advance(progress: Progress, value: float) -> tuple[int, tuple[float, ...], float]:
    progress.steps += 1
    progress.seen.append(value)
    progress.total += value
    return progress.steps, tuple(progress.seen), float(progress.total)


class Key:
    pass


def results(strategy: Any, step: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    return tuple(strategy.experimental_local_results(strategy.run(step, args=args)))


def start(strategy: Any, place: str) -> tuple[Any, Callable[[float], Any]]:
    """An object with slots in a trainer, in one with slots, in a module, or named by the step; what advances it."""
    with strategy.scope():
        progress = Progress()
        trainer = Trainer(progress)
        slotted = SlottedTrainer(trainer.model, progress)
        trainer.model.progress = progress
    places: dict[str, Callable[[], Progress]] = {
        "trainer": lambda: trainer.progress,
        "slots": lambda: slotted.progress,
        "module": lambda: trainer.model.progress,  # type: ignore[return-value]
        "step": lambda: progress,
    }
    found = places[place]
    return progress, lambda number: advance(found(), 10 * number + replica())


@pytest.mark.parametrize("place", ["trainer", "slots", "module", "step"])
def test_each_replica_counts_for_itself(strategy: Any, place: str) -> None:
    progress, step = start(strategy, place)
    for number in range(3):
        got = results(strategy, step, number)
    assert got == ((3, (0, 10, 20), 30), (3, (1, 11, 21), 33))
    assert (progress.steps, progress.seen, float(progress.total)) == (3, [0, 10, 20], 30)


@pytest.mark.parametrize("place", ["trainer", "slots", "step"])
def test_what_is_written_outside_of_run_reaches_all(strategy: Any, place: str) -> None:
    progress, step = start(strategy, place)
    strategy.run(step, args=(0,))
    progress.steps = 7
    assert results(strategy, step, 1) == ((8, (0, 10), 10), (8, (1, 11), 12))
    progress.total.fill_(100)
    progress.seen.clear()
    assert results(strategy, step, 2) == ((9, (20,), 120), (9, (21,), 121))
    progress.seen, progress.total = [5.0], torch.zeros(())
    assert results(strategy, step, 3) == ((10, (5, 30), 30), (10, (5, 31), 31))


def test_slots_of_a_subclass_private_ones_and_those_that_hold_nothing(strategy: Any) -> None:
    with strategy.scope():
        trainer = Trainer(Best())
    best: Any = trainer.progress

    def step(number: int) -> tuple[float, bool]:
        had = hasattr(best, "best_of_all")
        if replica() and number == 0:
            best.best_of_all = 1
        elif replica() and number == 1:
            del best.best_of_all
        assert trainer.model is not None
        return best.note(-number + replica()), had

    assert results(strategy, step, 0) == ((0, False), (1, False))
    assert not hasattr(best, "best_of_all")
    assert results(strategy, step, 1) == ((0, False), (1, True))
    assert results(strategy, step, 2) == ((0, False), (1, False))


def test_a_step_that_fails_leaves_one_state_for_all(strategy: Any) -> None:
    progress, step = start(strategy, "trainer")

    def fails(number: int) -> None:
        step(number)
        if replica():
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        strategy.run(fails, args=(0,))
    assert results(strategy, step, 1) == ((2, (0, 10), 10), (2, (0, 11), 11))
    assert progress.steps == 2


def test_an_average_of_the_weights_in_slots(strategy: Any) -> None:
    class Average:
        __slots__ = ("count", "weights")

        def __init__(self, model: nn.Module) -> None:
            self.weights, self.count = [p.detach().clone() for p in model.parameters()], 0

        @torch.no_grad()
        def update(self, model: nn.Module) -> None:
            self.count += 1
            for kept, parameter in zip(self.weights, model.parameters(), strict=True):
                kept.lerp_(parameter, 1 / (self.count + 1))

    def train(scope: Any, run: Callable[[Any], Any]) -> list[torch.Tensor]:
        with scope:
            torch.manual_seed(0)
            model = nn.Linear(2, 1)
            average = Average(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
            average.update(model)

        for _ in range(4):
            run(step)
        return average.weights

    ours = train(strategy.scope(), strategy.run)
    with td.OneDeviceStrategy("cpu:0") as one:
        alone = train(one.scope(), one.run)
    for got, wanted in zip(ours, alone, strict=True):
        torch.testing.assert_close(got, wanted)


def test_two_slots_of_one_name(strategy: Any) -> None:
    class Again(Progress):
        __slots__ = ("steps",)

    with strategy.scope():
        trainer = Trainer(Again())
    inner: Any = Progress.steps  # type: ignore[misc]
    inner.__set__(trainer.progress, 0)

    def step() -> tuple[int, int]:
        assert trainer.model is not None
        trainer.progress.steps += 1
        inner.__set__(trainer.progress, inner.__get__(trainer.progress) + 2)
        return trainer.progress.steps, inner.__get__(trainer.progress)

    strategy.run(step)
    assert results(strategy, step) == ((2, 4), (2, 4))


@pytest.mark.parametrize("named", [False, True])
def test_records_in_a_long_list_are_data(strategy: Any, named: bool) -> None:
    """Those of a replay buffer: a trainer's list is each replica's own, what is in it there once."""
    with strategy.scope():
        trainer: Any = Trainer(Progress())
        buffer = [Progress(number) for number in range(100)]
        trainer.buffer = list(buffer)

    def step() -> tuple[int, int]:
        kept = buffer if named else trainer.buffer
        kept.append(kept[0])
        kept[5].steps += 1
        return len(kept), kept[5].steps

    assert results(strategy, step) == ((101, 6), (102, 7) if named else (101, 7))


class Reports:
    def __init__(self) -> None:
        self.count = 0


REPORTS = Reports()


@dataclass(slots=True)
class Reporter:
    progress: Progress

    def report(self, value: float) -> tuple[int, int]:
        REPORTS.count += 1
        return REPORTS.count, advance(self.progress, value)[0]


def test_what_the_methods_name_is_found(strategy: Any) -> None:
    with strategy.scope():
        trainer: Any = Trainer(Progress())
        trainer.reporter = Reporter(trainer.progress)
    REPORTS.count = 0

    def step(number: int) -> tuple[int, int]:
        return trainer.reporter.report(number)

    for number in range(2):
        got = results(strategy, step, number)
    assert got == ((2, 2), (2, 2))


def test_what_nobody_holds_any_more_is_let_go(strategy: Any) -> None:
    _, step = start(strategy, "trainer")
    with strategy.scope():
        trainer = Trainer(Progress())

    def again(number: float) -> None:
        step(number)
        advance(trainer.progress, number)

    strategy.run(again, args=(0,))
    memory = ref(trainer.progress.total)
    trainer.progress = Progress()
    for number in range(2):
        strategy.run(again, args=(number,))
    wait_until_gone(memory)


def test_a_chain_that_nobody_holds_any_more_is_let_go_at_once(strategy: Any) -> None:
    with strategy.scope():
        trainer: Any = Trainer(Progress())
        for _ in range(20):
            trainer.chain = SlottedTrainer(trainer.model, getattr(trainer, "chain", trainer.progress))

    def step() -> None:
        if trainer.chain is not None:
            trainer.chain.calls += 1

    strategy.run(step)
    memory = ref(trainer.progress.total)
    trainer.chain, trainer.progress = None, Progress()
    for _ in range(2):
        strategy.run(step)
    wait_until_gone(memory)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("beside", [threading.Lock(), np.zeros(2000)], ids=["lock", "array"])
def test_what_belongs_to_a_lock_or_to_data_is_one_for_all(strategy: Any, beside: Any, inner: bool) -> None:
    with strategy.scope():
        has: Any = SlottedTrainer(beside, None) if inner else beside  # type: ignore[arg-type]
        counter: Any = SlottedTrainer(has, None)  # type: ignore[arg-type]
        model = nn.Linear(1, 1)

    def step() -> int:
        assert model is not None
        counter.calls += 1
        return counter.calls

    assert results(strategy, step) == (1, 2)


def test_keys_that_come_and_go(strategy: Any) -> None:
    with strategy.scope():
        trainer: Any = Trainer(Progress())
        trainer.kept, trainer.now = WeakKeyDictionary(), Key()
        trainer.kept[trainer.now] = trainer.kept[trainer.model] = 0

    def step() -> tuple[int, int]:
        before, trainer.now = trainer.kept[trainer.now], Key()  # with which the key before is gone
        trainer.kept[trainer.now] = before + 1 + replica()
        trainer.kept[trainer.model] += 1 + replica()
        return trainer.kept[trainer.now], trainer.kept[trainer.model]

    for number in range(1, 4):
        assert results(strategy, step) == ((number, number), (2 * number, 2 * number))
    kept = Key()
    trainer.kept[kept] = 5
    for number in range(4, 6):
        assert results(strategy, step) == ((number, number), (2 * number, 2 * number))
    assert trainer.kept[kept] == 5
    del kept
    assert results(strategy, step) == ((6, 6), (12, 12))
    assert len(trainer.kept) == 2


@pytest.mark.parametrize("kind", [UserDict, UserList, ChainMap, WeakKeyDictionary])
def test_mappings_and_lists_that_python_writes_in_python(strategy: Any, kind: Any) -> None:
    """The running average of a layer that a helper keeps by the layer, and the like."""
    with strategy.scope():
        trainer: Any = Trainer(Progress())
        key = trainer.model if kind is WeakKeyDictionary else "layer"
        trainer.kept = kind([torch.zeros(())]) if kind is UserList else kind()
        if kind is not UserList:
            trainer.kept[key] = torch.zeros(())

    def step(number: float) -> float:
        place = 0 if kind is UserList else key
        assert trainer.model is not None
        trainer.kept[place] += number + replica()
        return float(trainer.kept[place])

    assert results(strategy, step, 10.0) == (10, 11)
    assert results(strategy, step, 10.0) == (20, 22)
    trainer.kept[0 if kind is UserList else key].fill_(5)
    assert results(strategy, step, 10.0) == (15, 16)
