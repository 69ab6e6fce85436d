"""What a scheduled function writes to parameters past every update would be lost: it is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
LARGE = 70_000
"""More elements than a server copies for a worker of its host: the worker uses the server's own memory."""


def _by_hand(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        model.weight -= 0.1


def _clamp(model: nn.Module, optimizer: Any) -> None:
    model.weight.data.clamp_(-0.001, 0.001)


def _assign(model: nn.Module, optimizer: Any) -> None:
    model.weight.data = model.weight.data * 2


def _load(model: nn.Module, optimizer: Any) -> None:
    model.load_state_dict({"weight": torch.zeros(1, LARGE)})


def _before_the_step(model: nn.Module, optimizer: Any) -> None:
    _clamp(model, optimizer)
    model(torch.ones(1, LARGE)).sum().backward()
    optimizer.step()
    model(torch.ones(1, LARGE))


@pytest.mark.parametrize("change", [_by_hand, _clamp, _assign, _load, _before_the_step])
def test_what_would_be_lost_is_refused(cluster: Any, change: Callable[[Any, Any], None]) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Linear(LARGE, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = model.weight.detach().clone()
    c.coordinator.schedule(lambda: change(model, optimizer))
    with pytest.raises(RuntimeError, match="wrote to the parameter 'weight', which lives on parameter servers"):
        c.coordinator.join(timeout=30)
    assert torch.equal(c.coordinator.schedule(lambda: model.weight.detach().clone()).get(), before)
    assert torch.equal(model.weight.detach(), before)


@pytest.mark.parametrize("moved", [False, True])
def test_a_first_write_in_a_later_run_is_refused_too(cluster: Any, moved: bool) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Linear(2, 1)

    def step(number: int) -> None:
        if number == 6:  # a run in which no values are compared
            if moved:
                model.weight.data = model.weight.data * 2
            else:
                nn.init.zeros_(model.weight)

    for number in range(6):
        c.coordinator.schedule(step, args=(number,))
    c.coordinator.join(timeout=30)
    c.coordinator.schedule(step, args=(6,))
    with pytest.raises(RuntimeError, match="wrote to the parameter 'weight'"):
        c.coordinator.join(timeout=30)


def test_a_float_is_not_cut_off_on_a_server(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        counter = td.Variable(3)
    for value in (0.75, [1.0][0]):
        with pytest.raises(InvalidArgumentError, match=r"its dtype is torch\.int64, which has no fractions"):
            counter.assign_add(value)
        c.coordinator.schedule(lambda value=value: counter.assign_add(value) and None)
        with pytest.raises(ValueError, match=r"its dtype is torch\.int64, which has no fractions"):
            c.coordinator.join(timeout=30)
    counter.assign_add(1)
    assert counter.numpy() == 4
