"""Modules that come into being in the scope in other ways than by a constructor: copies, and conversions."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from tfstyle_dist.experimental.partitioners import FixedShardsPartitioner
from tfstyle_dist.variables import find_record

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cells(x.view(-1, 2, 2))[0][:, 0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.two(torch.tanh(self.one(x))))


class WithTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = Normed()
        self.teacher = copy.deepcopy(self.own).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) - 0.5 * self.teacher(x)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(2, 2, 4, 0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(4, 1))


MADE: dict[str, Callable[[], nn.Module]] = {
    "a transformer, whose layers are copies": transformer,
    "a copy": lambda: copy.deepcopy(Normed()),
    "copies in a list": lambda: nn.Sequential(*[copy.deepcopy(nn.Linear(4, 4)) for _ in range(2)], nn.Linear(4, 1)),
    "a copy of a recurrent layer": lambda: copy.deepcopy(Recurrent()),
    "a copy with a tied weight": lambda: copy.deepcopy(Tied()),
    "a copy of a part": WithTeacher,
    "what it was already": lambda: Normed().float().cpu(),
    "double": lambda: Normed().double(),
    "a recurrent layer in double": lambda: Recurrent().double(),
    "bfloat16": lambda: nn.Linear(4, 1).bfloat16(),
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    def step(seed: int) -> None:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("made", MADE)
def test_it_trains_as_on_one_device(cluster: Any, made: str, shards: int) -> None:
    c = cluster(workers=1, ps=shards, partitioner=FixedShardsPartitioner(shards))
    models = []
    for scope in (contextlib.nullcontext(), c.strategy.scope()):
        torch.manual_seed(0)
        with scope:
            models.append(MADE[made]())
    expected, found = models
    plain, scheduled = (step_of(model, optimizer_of(model)) for model in models)
    for seed in range(3):
        plain(seed)
        c.coordinator.schedule(scheduled, args=(seed,))
        c.coordinator.join(timeout=30)
    states = expected.state_dict(), found.state_dict()
    assert [*states[0]] == [*states[1]]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name] + 0, value)


def test_a_copy_made_outside_of_the_scope_is_nobodys(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = Normed()
    outside = copy.deepcopy(model)
    assert [type(p) for p in outside.parameters()] == [nn.Parameter] * 6
    assert all(find_record(tensor) is None for tensor in outside.state_dict().values())


def test_a_buffer_that_took_anothers_place_is_on_the_servers(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = Normed()

    def forward() -> None:
        model(torch.ones(2, 4))

    c.coordinator.schedule(forward)
    c.coordinator.join(timeout=30)
    model.norm.running_var = torch.full((4,), 8.0)

    def forward_again() -> None:
        model(torch.ones(2, 4))

    for _ in range(2):
        c.coordinator.schedule(forward_again)
        c.coordinator.join(timeout=30)
    torch.testing.assert_close(model.norm.running_var * 1, torch.full((4,), 8.0 * 0.9**2))


def test_a_model_that_was_used_keeps_its_type(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Linear(4, 1)
    c.coordinator.schedule(step_of(model, optimizer_of(model)), args=(0,))
    c.coordinator.join(timeout=30)
    with pytest.raises(TypeError, match="Convert the module in the scope in which it is built"):
        model.double()


def test_a_function_that_makes_a_buffer_larger_is_refused(cluster: Any) -> None:
    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.largest.resize_(x.shape[1:])
            return self.largest.copy_(x.amax(0)).clone()

    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = Observer()
    c.coordinator.schedule(lambda: model(torch.ones(2, 3)))
    with pytest.raises(
        RuntimeError, match=r"gave the buffer 'largest' the shape \(3,\).* it has \(1,\), and keeps that"
    ):
        c.coordinator.join(timeout=30)
    c.coordinator.schedule(lambda: model(torch.full((2, 1), 5.0))).fetch()
    assert model.largest.tolist() == [5.0]
