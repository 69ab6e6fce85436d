"""Objects of numbers in sets, deques and weak references: each replica's own, as those in lists are."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn


class Schedule:
    def __init__(self) -> None:
        self.count = 0

    def tick(self) -> int:
        self.count += 1
        return self.count


class Set(set[Any]):
    """A program's own."""


class Trainer:
    def __init__(self, kept: Any) -> None:
        self.model, self.kept = nn.Linear(1, 1), kept


CONTAINERS: dict[str, Callable[[Schedule], Any]] = {
    "set": lambda one: {one},
    "set of its own": lambda one: Set({one}),
    "frozen set": lambda one: frozenset({one}),
    "deque": lambda one: deque([one]),
    "list of weak methods": lambda one: [weakref.WeakMethod(one.tick)],
}


def _ticks(container: Any) -> int:
    found = next(iter(container))
    return int(found()() if isinstance(found, weakref.WeakMethod) else found.tick())


def _last(strategy: Any, step: Callable[[], int]) -> tuple[int, ...]:
    for _ in range(3):
        counts = strategy.experimental_local_results(strategy.run(step))
    return tuple(counts)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_trainer_has_them(strategy: Any, kind: str) -> None:
    schedule = Schedule()
    with strategy.scope():
        trainer = Trainer(CONTAINERS[kind](schedule))
    assert _last(strategy, lambda: _ticks(trainer.kept)) in ((3,), (3, 3))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_step_names_them(strategy: Any, kind: str) -> None:
    schedule = Schedule()
    kept = CONTAINERS[kind](schedule)
    assert _last(strategy, lambda: _ticks(kept)) in ((3,), (3, 3))


def test_one_that_comes_into_the_set_between_runs(strategy: Any) -> None:
    with strategy.scope():
        trainer = Trainer(set())

    def step() -> int:
        return sum(one.tick() for one in trainer.kept)

    assert _last(strategy, step) in ((0,), (0, 0))
    trainer.kept.add(Schedule())
    assert _last(strategy, step) in ((3,), (3, 3))
