"""Objects that have one dict of attributes together (``self.__dict__ = cls._state``): each replica has its own."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from this_replica import replica
from torch import nn
from until import wait_until_gone

import tfstyle_dist as td


class Shared:
    """One of several objects with the same attributes."""

    state: dict[str, Any]
    mean: float
    model: nn.Module

    def __init__(self) -> None:
        self.__dict__ = self.state


@pytest.fixture
def kind() -> type[Shared]:
    return type("Shared", (Shared,), {"state": {}})


def results(strategy: Any, step: Callable[[], Any]) -> list[tuple[Any, ...]]:
    return [tuple(strategy.experimental_local_results(strategy.run(step))) for _ in range(3)]


@pytest.mark.parametrize("where", ["named", "made in the step", "in the class"])
def test_what_one_writes_another_of_the_same_replica_reads(strategy: Any, kind: type[Shared], where: str) -> None:
    with strategy.scope():
        one, other = kind(), kind()
        one.model, one.mean = nn.Linear(1, 1), 0.0

    def step() -> float:
        another: Any = {"named": lambda: other, "made in the step": kind, "in the class": lambda: None}[where]()
        one.mean += 1.0 + replica()
        one.model.weight.grad = torch.zeros_like(one.model.weight)
        return another.mean if another is not None else kind.state["mean"]

    assert results(strategy, step) == [(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)]
    assert other.mean == 3.0
    other.mean = 10.0
    assert results(strategy, step)[0] == (11.0, 12.0)
    assert one.__dict__ is other.__dict__ is kind.state


def test_what_their_class_has_is_each_replicas_own_as_well(strategy: Any, kind: type[Shared]) -> None:
    class Trainer(kind):  # type: ignore[misc, valid-type]
        calls = Namespace(count=0)

        def step(self) -> int:
            self.calls.count += 1 + replica()
            return self.calls.count

    with strategy.scope():
        trainer, _ = Trainer(), Trainer()
        trainer.model = nn.Linear(1, 1)
    assert results(strategy, trainer.step) == [(1, 2), (2, 4), (3, 6)]


def test_without_a_model_they_are_shared_by_who_shares_them(strategy: Any, kind: type[Shared]) -> None:
    one, other = kind(), kind()
    one.mean = 0.0

    def step() -> float:
        one.mean += 1.0 + replica()
        return other.mean

    assert results(strategy, step) == [(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)]


def test_they_go_when_the_program_has_dropped_them(strategy: Any, kind: type[Shared]) -> None:
    with strategy.scope():
        one, other = kind(), kind()
        one.model = nn.Linear(1, 1)
    gone = ref(one.model)

    def step(held: Shared, again: Shared) -> None:
        held.model.weight.grad = torch.zeros_like(held.model.weight)
        assert again.model is held.model

    strategy.run(step, args=(one, other))
    del one, other
    kind.state = {}
    for _ in range(3):
        strategy.run(lambda: None)
    wait_until_gone(gone)


def test_an_object_whose_class_of_c_shows_no_attributes_stays_what_it_is(strategy: Any) -> None:
    loop = asyncio.new_event_loop()
    trainer = Namespace(pending=loop.create_future())
    with strategy.scope():
        trainer.model = nn.Linear(1, 1)
    assert results(strategy, lambda: trainer.pending.done()) == [(False,)] * 3
    loop.close()


def test_two_strategies_one_after_the_other_have_the_same_objects(kind: type[Shared]) -> None:
    one, other = kind(), kind()
    one.mean = 0.0

    def step() -> float:
        one.mean += 1.0 + replica()
        return other.mean

    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        assert results(strategy, step) == [(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)]
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        assert results(strategy, step) == [(4.0, 5.0), (5.0, 7.0), (6.0, 9.0)]


def test_a_dict_of_the_programs_of_them_does_not_change_what_they_are(strategy: Any) -> None:
    trainer: Any = Namespace(calls=0)
    with strategy.scope():
        trainer.model = nn.Linear(1, 1)
    kept = vars(trainer)

    def step() -> int:
        trainer.__dict__ = {**vars(trainer), "calls": trainer.calls + 1 + replica()}
        return trainer.calls

    assert results(strategy, step) == [(1, 2), (2, 4), (3, 6)]
    assert kept["calls"] == 0
