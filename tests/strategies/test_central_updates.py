"""Central storage in one process: an optimizer's step that finds parameters elsewhere than in its groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as td


class Keeps(torch.optim.Optimizer):
    """Goes through a list of parameters of its own, as L-BFGS and optimizers that are given a model do."""

    def __init__(self, model: nn.Module, change: Callable[[nn.Parameter], Any]) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.kept, self.change = list(model.parameters()), change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.kept:
            self.change(parameter)


def trained(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], steps: int = 2) -> tuple[nn.Module, nn.Module]:
    """A model that two replicas train over central storage, and one that one device trains."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 1)
            optimizer = optimizer_of(model)
        alone = nn.Linear(2, 1)
        alone.load_state_dict(model.state_dict())
        for _ in range(steps):
            strategy.run(step, args=(model, optimizer))
    optimizer = optimizer_of(alone)
    for _ in range(steps):
        step(alone, optimizer)
    return model, alone


@pytest.mark.parametrize("write", ["in place", "data", "new data"])
def test_an_update_that_is_not_of_the_groups_is_refused(write: str) -> None:
    def change(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if write == "in place":
            parameter.sub_(parameter.grad, alpha=0.1)
        elif write == "data":
            parameter.data.sub_(parameter.grad, alpha=0.1)
        else:
            parameter.data = parameter.data - 0.1 * parameter.grad

    with pytest.raises(
        RuntimeError,
        match=r"Keeps.step\(\), or a hook of it, changes parameters that it does not take from param_groups",
    ):
        trained(lambda model: Keeps(model, change))


def test_an_average_of_weights_in_a_hook_is_refused() -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        average = copy.deepcopy(model)

        def averaged(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            with torch.no_grad():
                for own, parameter in zip(average.parameters(), model.parameters(), strict=True):
                    own.lerp_(parameter, 0.5)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        optimizer.register_step_post_hook(averaged)
        return optimizer

    with pytest.raises(RuntimeError, match=r"SGD.step\(\), or a hook of it, changes parameters"):
        trained(optimizer_of)


@pytest.mark.parametrize("limited", [lambda p: p.clamp_(-0.2, 0.2), lambda p: p.div_(p.norm() * 1.1)])
def test_a_limit_to_weights_that_are_not_of_the_groups_is_good(limited: Callable[[torch.Tensor], Any]) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

        def limit(*_: Any) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    limited(parameter)

        optimizer.register_step_post_hook(limit)
        return optimizer

    model, alone = trained(optimizer_of, steps=4)
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


class NamesItself(torch.optim.SGD):
    """Has a method of its own in an attribute and in a list, as heavyball's optimizers do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.inner, self.calls = self.halve, [self.halve]

    @torch.no_grad()
    def halve(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner()
        super().step()


def test_an_optimizer_may_have_methods_of_its_own_in_attributes() -> None:
    model, alone = trained(NamesItself)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
