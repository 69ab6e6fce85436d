"""An object has one class for all replicas of a process: a step that gives it another one is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.core import logging


@pytest.fixture(params=[["cpu:0", "cpu:1"], ["cpu:0"]], ids=["two", "one"])
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    logging._said.clear()
    with td.MirroredStrategy(request.param) as made:
        yield made


class Cold:
    pass


class Warm(Cold):
    pass


class Scaled(nn.Linear):
    pass


SAID = "A step made an object of the class {} one of the class {}"


def test_it_is_said_once(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.state = nn.Linear(1, 1), Cold()

        def step(self) -> None:
            self.state.__class__ = Warm

    with strategy.scope():
        trainer = Trainer()
    strategy.run(lambda: trainer.model(torch.ones(1, 1)))
    assert "A step made" not in caplog.text
    for _ in range(2):
        trainer.state.__class__ = Cold  # outside: for all
        strategy.run(trainer.step)
    assert caplog.text.count(SAID.format("Cold", "Warm")) == (strategy.num_replicas_in_sync > 1)


def test_the_class_of_a_module(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    with strategy.scope():
        model, lazy = nn.Linear(1, 1), nn.LazyLinear(1)

    def step() -> None:
        lazy(model(torch.ones(1, 1)))  # it becomes another one in its first call, for all replicas
        model.__class__ = Scaled

    strategy.run(step)
    assert caplog.text.count("A step made") == (strategy.num_replicas_in_sync > 1)
    assert (SAID.format("Linear", "Scaled") in caplog.text) == (strategy.num_replicas_in_sync > 1)


def test_it_is_said_after_joint_work_too(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    class State(Cold):
        pass

    with strategy.scope():
        model, state = nn.Linear(1, 1), State()

    def step() -> None:
        td.get_replica_context().merge_call(lambda _: None)  # type: ignore[union-attr]
        state.__class__ = Warm
        model.last = state

    strategy.run(lambda: (model(torch.ones(1, 1)), state))
    strategy.run(step)
    assert ("one of the class Warm" in caplog.text) == (strategy.num_replicas_in_sync > 1)
