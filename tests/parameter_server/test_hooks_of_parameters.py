"""Hooks and gradients of parameters of the coordinator are kept when servers take a parameter over, and after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.timeout(90)


def steps(model: nn.Module, optimizer: Any, count: int) -> list[torch.Tensor]:
    """The weights after each step."""
    seen = []
    for number in range(1, count + 1):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(number))).pow(2).sum().backward()
        optimizer.step()
        seen.append(model.weight.detach().clone())
    return seen


def pair(strategy: Any, before: Any, after: Any) -> tuple[nn.Module, nn.Module]:
    """A model on the servers and one of this process, each told to ``before`` and ``after`` it was taken over."""
    torch.manual_seed(0)
    ours, alone = nn.Linear(3, 1), nn.Linear(3, 1)
    alone.load_state_dict(ours.state_dict())
    for model in (ours, alone):
        before(model)
    strategy.experimental_adopt(ours)
    for model in (ours, alone):
        after(model)
    return ours, alone


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def nothing(model: nn.Module) -> None:
    pass


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_changes_the_gradient_in_every_step_until_it_is_removed(cluster: Any, when: str) -> None:
    strategy, handles = cluster(workers=1, ps=1).strategy, []

    def register(model: nn.Module) -> None:
        handles.append(model.weight.register_hook(lambda gradient: gradient * 0.5))

    ours, alone = pair(strategy, *((register, nothing) if when == "before" else (nothing, register)))
    optimizers = [sgd(model) for model in (ours, alone)]
    torch.testing.assert_close(steps(ours, optimizers[0], 3), steps(alone, optimizers[1], 3))
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(steps(ours, optimizers[0], 2), steps(alone, optimizers[1], 2))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_for_accumulated_gradients_is_called_in_every_step(cluster: Any, when: str) -> None:
    strategy, calls = cluster(workers=1, ps=1).strategy, {}

    def register(model: nn.Module) -> None:
        own = calls.setdefault(id(model), [])
        model.weight.register_post_accumulate_grad_hook(lambda leaf: own.append(leaf.grad.clone()))

    ours, alone = pair(strategy, *((register, nothing) if when == "before" else (nothing, register)))
    for model in (ours, alone):
        steps(model, sgd(model), 3)
    assert len(calls[id(alone)]) == 3
    torch.testing.assert_close(calls[id(ours)], calls[id(alone)])


def test_a_hook_of_a_frozen_parameter_is_called_when_it_thaws(cluster: Any) -> None:
    strategy = cluster(workers=1, ps=1).strategy

    def register(model: nn.Module) -> None:
        model.weight.register_hook(lambda gradient: gradient * 0.5)
        model.weight.requires_grad_(False)

    ours, alone = pair(strategy, register, nothing)
    for model in (ours, alone):
        optimizer = sgd(model)
        steps(model, optimizer, 1)
        assert not model.weight.requires_grad
        model.weight.requires_grad_(True)
        model.seen = steps(model, optimizer, 2)
    torch.testing.assert_close(ours.seen, alone.seen)


def test_a_hook_sees_the_gradients_of_graphs_made_before_and_after_a_step(cluster: Any) -> None:
    strategy, x = cluster(workers=1, ps=1).strategy, torch.ones(2, 3)
    ours, alone = pair(strategy, nothing, lambda model: model.weight.register_hook(lambda gradient: gradient * 0.5))
    for model in (ours, alone):
        optimizer = sgd(model)
        early = model(x).sum()
        steps(model, optimizer, 1)
        optimizer.zero_grad()
        (early + model(2 * x).sum()).backward()
    torch.testing.assert_close(ours.weight.grad, alone.weight.grad)


def test_a_hook_that_is_removed_is_not_called_for_older_graphs(cluster: Any) -> None:
    strategy, handles = cluster(workers=1, ps=1).strategy, []
    ours, _ = pair(
        strategy, nothing, lambda model: handles.append(model.weight.register_hook(lambda gradient: 0 * gradient))
    )
    early = ours(torch.ones(2, 3)).sum()
    optimizer = sgd(ours)
    steps(ours, optimizer, 1)
    optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    early.backward()
    assert ours.weight.grad.tolist() == [[2, 2, 2]]


def test_a_gradient_from_before_is_used(cluster: Any) -> None:
    strategy = cluster(workers=1, ps=1).strategy
    ours, alone = pair(strategy, lambda model: model(torch.ones(2, 3)).sum().backward(), nothing)
    for model in (ours, alone):
        sgd(model).step()
    torch.testing.assert_close(ours.weight.detach(), alone.weight.detach())


def test_a_function_that_uses_a_parameter_with_a_hook_from_before_is_refused(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    ours, _ = pair(c.strategy, lambda model: model.weight.register_hook(lambda gradient: gradient * 0.5), nothing)
    optimizer = sgd(ours)
    steps(ours, optimizer, 2)

    def step() -> None:
        steps(ours, optimizer, 1)

    with pytest.raises(TypeError, match="has a hook of the coordinator's program"):
        c.coordinator.schedule(step).fetch()


def test_a_parameter_of_no_module_is_adopted(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        temperature = c.strategy.experimental_adopt(nn.Parameter(torch.tensor(0.5)))
        optimizer = torch.optim.SGD([temperature], lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        (temperature * 2).backward()
        optimizer.step()

    c.coordinator.schedule(step).fetch()
    torch.testing.assert_close(temperature.detach().clone(), torch.tensor(0.3))
    with pytest.raises(TypeError, match=r"Parameter servers take over a torch.nn.Parameter, got a Tensor"):
        c.strategy.experimental_adopt(torch.zeros(1, requires_grad=True))
