"""What methods of a program's own classes name: schedules and counters that ``forward`` finds as globals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from this_replica import replica
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.variables.content.discovery import is_of_library


class Counter:
    def __init__(self) -> None:
        self.count, self.seen = 0, []

    def note(self) -> None:
        self.count += 1
        self.seen = [*self.seen, replica()]


COUNTER = Counter()
"""Of this module; the steps below reach it through methods alone."""


class NamesAGlobal(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        COUNTER.note()
        return super().forward(x)


class Inherits(NamesAGlobal):
    pass


def _note() -> None:
    COUNTER.note()


class NamesAFunction(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _note()
        return super().forward(x)


class HasAProperty(nn.Linear):
    @property
    def noted(self) -> int:
        COUNTER.note()
        return 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.noted


class HasAStaticMethod(nn.Linear):
    @staticmethod
    @torch.no_grad()
    def noted() -> int:
        COUNTER.note()
        return 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.noted()


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        COUNTER.note()
        return gradient


class CallsAFunction(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Noting.apply(super().forward(x))  # type: ignore[no-any-return,no-untyped-call]


class NotingSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        COUNTER.note()
        return super().step(closure)


class NotingLoss:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        COUNTER.note()
        return x.sum()


class Trainer:
    def __init__(self, model: Any = nn.Linear, optimizer: Any = torch.optim.SGD, loss: Any = torch.sum) -> None:
        self.model, self.loss = model(1, 1), loss
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(torch.ones(1, 1))).backward()
        self.optimizer.step()


class NotingTrainer(Trainer):
    def step(self) -> None:
        super().step()
        self.end()

    def end(self) -> None:
        COUNTER.note()


CASES: dict[str, Callable[[], Trainer]] = {
    **{
        kind.__name__: lambda kind=kind: Trainer(kind)  # type: ignore[misc]
        for kind in (NamesAGlobal, Inherits, NamesAFunction, HasAProperty, HasAStaticMethod, CallsAFunction)
    },
    "optimizer": lambda: Trainer(optimizer=NotingSGD),
    "loss": lambda: Trainer(loss=NotingLoss()),
    "trainer": NotingTrainer,
}


@pytest.mark.parametrize("case", CASES)
def test_what_methods_name_is_each_replicas_own(strategy: Any, case: str) -> None:
    COUNTER.__init__()  # type: ignore[misc]
    with strategy.scope():
        trainer = CASES[case]()
    for _ in range(3):
        strategy.run(trainer.step)
    found = strategy.run(lambda: (COUNTER.count, list(COUNTER.seen)))
    assert list(strategy.experimental_local_results(found)) == [(3, [r] * 3) for r in range(2)]
    COUNTER.count = 10
    strategy.run(trainer.step)
    counts = strategy.experimental_local_results(strategy.run(lambda: COUNTER.count))
    assert counts in ((11,), (11, 11))


def test_a_step_that_names_the_class_alone(strategy: Any) -> None:
    COUNTER.__init__()  # type: ignore[misc]
    with strategy.scope():
        model = nn.Linear(1, 1)

    def step() -> None:
        Noting.apply(model(torch.ones(1, 1))).backward()  # type: ignore[no-untyped-call]

    for _ in range(3):
        strategy.run(step)
    found = strategy.run(lambda: (COUNTER.count, list(COUNTER.seen)))
    assert list(strategy.experimental_local_results(found)) == [(3, [r] * 3) for r in range(2)]


def test_what_stays_common_in_a_hook_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A number that a hook counts, and a tensor that it writes to: the replicas share them."""
    strategy = td.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        trainer = Trainer()

    def attach() -> None:
        number, scale = 0, torch.ones(1)

        def hook(*_: Any) -> None:
            nonlocal number
            number += 1
            scale.mul_(0.9)

        trainer.model.register_forward_hook(hook)

    attach()
    for _ in range(2):
        strategy.run(trainer.step)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("the variable 'number'" in message for message in messages) == 1
    assert sum("wrote to a tensor of shape (1,)" in message for message in messages) == 1
    strategy.close()


@pytest.mark.parametrize("kind", [td.Variable, td.train.Checkpoint, td.MirroredStrategy, torch.nn.Linear])
def test_what_the_methods_of_this_package_and_of_torch_name_is_not_looked_for(kind: type) -> None:
    assert is_of_library(kind)
