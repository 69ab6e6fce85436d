"""What is reached through a function alone: hooks, replaced methods and callbacks that a module or a trainer has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from this_replica import replica
from torch import nn

import tfstyle_dist as td


class Counter:
    def __init__(self) -> None:
        self.count, self.seen = 0, []

    def note(self, *_: Any) -> None:
        self.count += 1
        if td.in_cross_replica_context():
            self.count = 0
            return
        self.seen = [*self.seen, replica()]


NOTED: list[Counter] = []
"""Looked at from outside alone: the steps do not name it."""


def _named() -> Callable[..., None]:
    counter = Counter()
    NOTED[:] = [counter]

    def note(*_: Any) -> None:
        counter.note()

    return note


def _method() -> Callable[..., None]:
    NOTED[:] = [Counter()]
    return NOTED[0].note


def _default() -> Callable[..., None]:
    NOTED[:] = [Counter()]
    return lambda *_, counter=NOTED[0]: counter.note()


def _partial() -> Callable[..., None]:
    NOTED[:] = [Counter()]
    return functools.partial(Counter.note, NOTED[0])


def _wrapped() -> Callable[..., None]:
    note = _named()

    @functools.wraps(note)
    def noted(*arguments: Any) -> None:
        note(*arguments)

    return noted


def _forward(trainer: Any, note: Callable[..., None]) -> None:
    trainer.model.register_forward_hook(note)


def _before_forward(trainer: Any, note: Callable[..., None]) -> None:
    trainer.model.register_forward_pre_hook(note)


def _gradient(trainer: Any, note: Callable[..., None]) -> None:
    trainer.model.weight.register_hook(note)


def _accumulated(trainer: Any, note: Callable[..., None]) -> None:
    trainer.model.weight.register_post_accumulate_grad_hook(note)


def _replaced_method(trainer: Any, note: Callable[..., None]) -> None:
    forward = trainer.model.forward

    def noting(x: torch.Tensor) -> torch.Tensor:
        note()
        return forward(x)  # type: ignore[no-any-return]

    trainer.model.forward = noting


def _event(trainer: Any, note: Callable[..., None]) -> None:
    trainer.events["end"].append(note)


class Trainer:
    def __init__(self) -> None:
        self.model, self.events = nn.Linear(1, 1), {"end": []}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).sum().backward()
        self.optimizer.step()
        for event in self.events["end"]:
            event(self)


def _counts(strategy: Any) -> list[tuple[int, list[int]]]:
    found = strategy.run(lambda: (NOTED[0].count, list(NOTED[0].seen)))
    return list(strategy.experimental_local_results(found))


@pytest.mark.parametrize("when", ["in the scope", "before the first run", "between runs"])
@pytest.mark.parametrize("place", [_forward, _before_forward, _gradient, _accumulated, _replaced_method, _event])
def test_what_a_hook_names_is_each_replicas_own(strategy: Any, place: Callable[..., None], when: str) -> None:
    with strategy.scope():
        trainer = Trainer()
        if when == "in the scope":
            place(trainer, _named())
    if when == "before the first run":
        place(trainer, _named())
    if when == "between runs":
        strategy.run(trainer.step)
        place(trainer, _named())
    for _ in range(3):
        strategy.run(trainer.step)
    assert _counts(strategy) == [(3, [r] * 3) for r in range(2)]


@pytest.mark.parametrize("make", [_named, _method, _default, _partial, _wrapped])
def test_however_a_hook_names_it(strategy: Any, make: Callable[[], Callable[..., None]]) -> None:
    with strategy.scope():
        trainer = Trainer()
        _forward(trainer, make())
    for _ in range(3):
        strategy.run(trainer.step)
    assert _counts(strategy) == [(3, [r] * 3) for r in range(2)]


class Scale:
    """A hook that is an object."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return gradient / self.count


def test_a_hook_of_a_parameter_may_be_an_object(strategy: Any) -> None:
    scale = Scale()
    with strategy.scope():
        trainer = Trainer()
    trainer.model.weight.register_hook(scale)
    for _ in range(3):
        strategy.run(trainer.step)
    assert scale.count == 3
    scale.count = 0  # reaches all replicas
    strategy.run(trainer.step)
    counts = strategy.experimental_local_results(strategy.run(lambda: next(iter(_hooks_of(trainer))).count))
    assert counts in ((1,), (1, 1))


def _hooks_of(trainer: Trainer) -> list[Any]:
    return list((trainer.model.weight._backward_hooks or {}).values())


def test_a_schedule_that_a_rate_alone_names(strategy: Any) -> None:
    def factors() -> Callable[[int], float]:
        counter = Counter()

        def factor(_: int) -> float:
            counter.note()
            return 1.0 / max(1, counter.count)

        return factor

    with strategy.scope():
        trainer = Trainer()
        scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, factors())

    def step() -> None:
        trainer.step()
        scheduler.step()

    for _ in range(3):
        strategy.run(step)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3)
