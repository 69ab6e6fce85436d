"""Generators of Python's and numpy's random numbers that a step names: each replica has a stream, as a process has."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from until import wait_until

import tfstyle_dist as td

MADE: dict[str, tuple[Callable[[int], Any], Callable[[Any], float]]] = {
    "Random": (random.Random, lambda made: made.gauss(0, 1)),
    "default_rng": (np.random.default_rng, lambda made: float(made.normal())),
    "Mersenne": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda made: float(made.normal())),
    "RandomState": (np.random.RandomState, lambda made: float(made.normal())),
}


def _each(strategy: Any, step: Callable[[], Any]) -> list[Any]:
    found = list(strategy.experimental_local_results(strategy.run(step)))
    return found * (3 - len(found))  # one value where it is the same object


@pytest.mark.parametrize("kind", MADE)
def test_a_generator_that_a_step_names(strategy: Any, kind: str) -> None:
    make, draw = MADE[kind]
    generator, alone = make(3), make(3)
    for _ in range(3):
        expected = [draw(alone) for _ in range(3)]
        assert _each(strategy, lambda: [draw(generator) for _ in range(3)]) == [expected] * 2
    assert draw(generator) == draw(alone)  # drawn outside: so all replicas go on behind it
    expected = [draw(alone)]
    assert _each(strategy, lambda: [draw(generator)]) == [expected] * 2


def test_a_generator_of_a_class_of_the_program(strategy: Any) -> None:
    class Counting(random.Random):
        def __init__(self) -> None:
            self.drawn = 0.0
            super().__init__()

        def random(self) -> float:
            self.drawn += 0.125
            return self.drawn

    generator = Counting()
    for expected in (0.125, 0.25):
        assert _each(strategy, lambda: [generator.random()]) == [[expected]] * 2


@pytest.mark.parametrize("kind", MADE)
def test_draws_on_both_sides_of_a_call_that_all_make(strategy: Any, kind: str) -> None:
    make, draw = MADE[kind]
    generator, alone = make(3), make(3)

    def step() -> list[float]:
        first = draw(generator)
        td.get_replica_context().all_reduce("SUM", torch.ones(1))  # type: ignore[union-attr]
        return [first, draw(generator)]

    for _ in range(2):
        expected = [draw(alone), draw(alone)]
        assert _each(strategy, step) == [expected] * 2


def test_two_generators_of_one_stream(strategy: Any) -> None:
    bits, alone = np.random.PCG64(3), np.random.Generator(np.random.PCG64(3))
    one, other = np.random.Generator(bits), np.random.Generator(bits)
    for _ in range(3):
        expected = [alone.random(), alone.random()]
        assert _each(strategy, lambda: [one.random(), other.random()]) == [expected] * 2


def test_a_generator_that_the_step_names_and_a_trainer_has(strategy: Any) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.generator = nn.Linear(1, 1), generator

    generator, alone = random.Random(3), random.Random(3)
    with strategy.scope():
        trainer = Trainer()

    def step() -> list[float]:
        return [generator.random(), trainer.generator.random()]

    strategy.run(lambda: generator.random())
    alone.random()
    for _ in range(2):
        expected = [alone.random(), alone.random()]
        assert _each(strategy, step) == [expected] * 2


def test_a_generator_is_let_go(strategy: Any) -> None:
    generator = random.Random(3)
    gone = weakref.ref(generator)
    strategy.run(lambda held=generator: held.random())
    del generator

    def is_gone() -> bool:  # the thread of a replica may hold what it ran a moment longer
        strategy.run(lambda: None)
        gc.collect()
        return gone() is None

    wait_until(is_gone)


def test_a_trainer_may_have_one_without_a_state(strategy: Any) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.generator = nn.Linear(1, 1), random.SystemRandom()

    with strategy.scope():
        trainer = Trainer()
    assert all(0 <= drawn < 1 for drawn in _each(strategy, lambda: trainer.generator.random()))
