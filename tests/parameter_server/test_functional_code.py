"""Functional code with what is on servers: ``torch.func``, ``torch.autograd.Function``, leaves of the program's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import func, nn
from torch.autograd import functional

import tfstyle_dist as tfd

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

X = torch.arange(3.0)


class Scaled(torch.autograd.Function):
    """A function of somebody else, which gives its second argument a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.weight)


def energy(weight: torch.Tensor) -> torch.Tensor:
    return ((weight * X) ** 2).sum()


def leaf(weight: Any) -> torch.Tensor:
    own = weight.detach().requires_grad_()
    energy(own).backward()
    return own.grad


WAYS: dict[str, Callable[[Any], Any]] = {
    "grad": func.grad(energy),
    "grad of a dict": lambda w: func.grad(lambda given: energy(given["w"]))({"w": w})["w"],
    "vmap": func.vmap(lambda part: part * 2),
    "vmap around a read": lambda w: func.vmap(lambda row: (row * w).sum())(torch.eye(3)),
    "jvp": lambda w: func.jvp(energy, (w,), (torch.ones(3),))[1],
    "vjp": lambda w: func.vjp(energy, w)[1](torch.tensor(1.0))[0],
    "jacrev": func.jacrev(energy),
    "hessian": func.hessian(energy),
    "jacobian": lambda w: functional.jacobian(energy, w),
    "leaf": leaf,
    "function": lambda w: Scaled.apply(torch.ones(3), w),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_value_on_the_servers_is_taken(cluster: Any, way: str) -> None:
    c = cluster(workers=1, ps=1)
    values = torch.arange(3.0) + 1
    expected = WAYS[way](nn.Parameter(values.clone())).detach()
    with c.strategy.scope():
        variables = [tfd.Variable(torch.zeros(3), trainable=True) for _ in range(2)]
        parameter = Model().weight
    with torch.no_grad():
        parameter.copy_(values)
    for made in (variables[0], parameter):
        if made is not parameter:
            made.assign(values)
        torch.testing.assert_close(WAYS[way](made).detach(), expected)
        torch.testing.assert_close(made.detach().clone(), values)
    variables[1].assign(values)
    found = c.coordinator.schedule(lambda: WAYS[way](variables[1]).detach().clone()).get()
    torch.testing.assert_close(found, expected)


def test_a_model_with_a_function_of_its_own_trains(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = Model()
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(X).pow(2).sum().backward()
        optimizer.step()

    for number in range(4):
        if number % 2:
            step(model, optimizer)
        else:
            c.coordinator.schedule(lambda: step(model, optimizer)).fetch()
        step(alone, theirs)
        torch.testing.assert_close(model.weight.detach().clone(), alone.weight.detach())


def test_a_variable_gets_its_gradient_from_a_function(cluster: Any) -> None:
    strategy = cluster(workers=1, ps=1).strategy
    with strategy.scope():
        made = tfd.Variable(torch.ones(3), trainable=True)
    Scaled.apply(X, made).sum().backward()
    assert made.grad.tolist() == X.tolist()


def test_reads_in_inference_mode_and_of_other_tensors_in_the_same_memory(cluster: Any) -> None:
    strategy = cluster(workers=1, ps=1).strategy
    with strategy.scope():
        made = tfd.Variable(torch.zeros(3), trainable=True)
    view = made.detach()
    made.assign(torch.ones(3))
    with torch.inference_mode():
        assert func.vmap(lambda row: (row * made).sum())(torch.eye(3)).tolist() == [1, 1, 1]
    made.assign(2 * torch.ones(3))
    assert func.grad(energy)(view).tolist() == [0, 4, 16]
    assert made.requires_grad
    energy(made).backward()
    assert made.grad.tolist() == [0, 4, 16]
