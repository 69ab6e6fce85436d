"""What functions change in buffers, where a sum on the servers would not give it: infinities, large values, bools."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Ranges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.full((2, 3), float("inf")))
        self.register_buffer("high", torch.full((2, 3), -float("inf")))
        self.register_buffer("best", torch.tensor([1e9, 1e9, 3e38]))
        self.register_buffer("mask", torch.tensor([0.0, -float("inf"), float("nan")]))
        self.register_buffer("last", torch.tensor(float("nan"), dtype=torch.float64))
        self.register_buffer("step", torch.tensor([1, 2], dtype=torch.uint8))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: float, number: int) -> None:
        self.low[:, 1:] = self.low[:, 1:].clamp(max=x)
        self.high.copy_(self.high.clamp(min=x))
        self.best.copy_(torch.tensor([x, -1e9, -3e38]) if number else self.best.clamp(max=x))
        self.mask[0] = x if number else -float("inf")
        self.last.fill_(x)
        self.step[0] = 255 - number
        self.seen[number] = True


def same(found: nn.Module, wanted: nn.Module) -> None:
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name].clone(), value, rtol=0, atol=0, equal_nan=True, msg=name)


def a_third(variable_shape: Any, dtype: Any) -> list[int]:
    return [min(variable_shape[0], 3), *[1] * (len(variable_shape) - 1)]


@pytest.mark.parametrize("partitioner", [None, a_third])
def test_they_are_those_of_one_device(cluster: Any, partitioner: Any) -> None:
    c = cluster(workers=1, ps=2, partitioner=partitioner)
    with c.strategy.scope():
        model = Ranges()
    alone = Ranges()
    for number, x in enumerate((5.0, 0.3, 2.0)):
        c.coordinator.schedule(model, args=(x, number)).get(timeout=30)
        alone(x, number)
        same(model, alone)


def test_what_others_add_meanwhile_stays(cluster: Any, tmp_path: Path) -> None:
    c = cluster(workers=2, ps=1)
    c.await_workers()
    with c.strategy.scope():
        model = Ranges()
        model.register_buffer("sums", torch.tensor([0.0, float("inf"), 1e9, 1.0]))
    begun, done = tmp_path / "begun", tmp_path / "done"

    def slow() -> None:
        begun.touch()
        end = time.monotonic() + 30
        while not done.exists() and time.monotonic() < end:
            time.sleep(0.01)
        model.seen[0] = True
        model.sums.copy_(torch.tensor([1.0, 4.0, 0.3, 0.0001]))

    def quick() -> None:
        model.seen[2] = True
        model.sums += torch.tensor([2.0, 0.0, 0.0, 0.5])

    first = c.coordinator.schedule(slow, worker=0)
    end = time.monotonic() + 30
    while not begun.exists() and time.monotonic() < end:
        time.sleep(0.01)
    c.coordinator.schedule(quick, worker=1).get(timeout=30)
    done.touch()
    first.get(timeout=60)
    assert model.seen.tolist() == [True, False, True]
    torch.testing.assert_close(model.sums * 1, torch.tensor([3.0, 4.0, 0.3, 0.5001]))
