"""Functional code with what is on servers: ``torch.func``, ``torch.autograd.Function``, leaves of the program's own."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import functional_code
import pytest
import torch
from functional_code import WAYS, Model, Scaled, X, energy
from torch import func, nn

import tfstyle_dist as tfd

pytestmark = pytest.mark.timeout(90)
for _module in (sys.modules[__name__], functional_code):
    cloudpickle.register_pickle_by_value(_module)


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
