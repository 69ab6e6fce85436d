"""What the program changes in modules between two functions reaches functions that were scheduled before."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1, bias=False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("shift", None)
        nn.init.ones_(self.inner.weight)

    def forward(self) -> torch.Tensor:
        value = (self.inner(torch.ones(1, 1)) * self.scale).sum()
        return value if self.shift is None else value + self.shift.sum()


def test_training_and_evaluation(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(0.5)))

    def modes() -> list[bool]:
        return [module.training for module in model.modules()]

    for change in (model.eval, model.train, model[2].eval, lambda: setattr(model[1], "training", False), model.train):
        change()
        assert c.coordinator.schedule(modes).get(timeout=30) == modes()
    before = len(c.coordinator._functions.parts)
    for _ in range(3):
        model.eval()
        assert not any(c.coordinator.schedule(modes).get(timeout=30))
        model.train()
        assert all(c.coordinator.schedule(modes).get(timeout=30))
    assert len(c.coordinator._functions.parts) == before  # nothing is sent twice


def test_what_comes_into_the_place_of_a_tensor(cluster: Any) -> None:
    c = cluster(workers=1, ps=2)
    with c.strategy.scope():
        model, other = Scaled(), nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def value() -> float:
        return float(model().detach())

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    def same(wanted: float) -> None:
        assert (c.coordinator.schedule(value).get(timeout=30), value()) == (wanted, wanted)

    same(1.0)
    pickled = len(c.coordinator._functions.parts)
    model.scale = torch.tensor([3.0])
    same(3.0)
    assert len(c.coordinator._functions.parts) == pickled  # the values alone have changed
    model.load_state_dict({"inner.weight": torch.full((1, 1), 5.0), "scale": torch.ones(1)}, assign=True)
    same(5.0)
    model.inner.weight = given = nn.Parameter(torch.full((1, 1), 2.0))
    same(2.0)
    c.coordinator.schedule(step).get(timeout=30)
    same(2.0)  # the optimizer has the parameter that was there, as on one device
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    c.coordinator.schedule(lambda: step()).get(timeout=30)
    same(1.0)
    other.weight = given  # one parameter in two places
    assert other.weight is model.inner.weight
    model.scale = torch.ones(2)  # another shape
    same(2.0)
    model.shift = torch.tensor([4.0])
    same(6.0)
    model.shift = None
    same(2.0)
    model.inner.weight.requires_grad_(False)
    model.inner.weight = nn.Parameter(torch.zeros(1, 1))
    assert c.coordinator.schedule(lambda: model.inner.weight.requires_grad).get(timeout=30)
    model.inner.weight = nn.Parameter(torch.full((3, 1), 2.0))
    model.scale = torch.ones(1)
    same(6.0)
    model.inner = nn.Linear(1, 1, bias=False).requires_grad_(False)
    nn.init.constant_(model.inner.weight, 7.0)
    same(7.0)
    c.strategy.close()
    model.scale = kept = torch.tensor([9.0])
    assert model.scale is kept
