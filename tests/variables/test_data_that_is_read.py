"""Frozen parameters with statistics of a share, whose ``.data`` a program reads outside of ``run``, or writes to."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import tfstyle_dist as td

TWO = ["cpu:0", "cpu:1"]


class Normed(nn.Module):
    """A batch norm whose statistics are frozen parameters, as meta-learning code keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.mean = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.var = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, self.mean, self.var, self.weight, training=True)


def _means(strategy: td.Strategy, model: Normed) -> list[list[float]]:
    found = strategy.run(lambda: model.mean.detach().clone())
    return [mean.tolist() for mean in strategy.experimental_local_results(found)]


def _trained(strategy: td.Strategy, model: Normed) -> None:
    def step() -> None:
        context = td.get_replica_context()
        assert context is not None
        model(torch.arange(8.0).view(4, 2) + 10.0 * context.replica_id_in_sync_group)

    strategy.run(step)


READS: dict[str, Callable[[Normed], object]] = {
    "nothing": lambda model: None,
    "deepcopy": copy.deepcopy,
    "data": lambda model: model.mean.data,
    "a copy of the data": lambda model: model.mean.data.clone(),
    "all data": lambda model: [p.data for p in model.parameters()],
}


@pytest.mark.parametrize("read", list(READS))
def test_each_replica_keeps_its_own_statistics(read: str) -> None:
    with td.MirroredStrategy(TWO) as strategy:
        with strategy.scope():
            model = Normed()
        for _ in range(2):
            _trained(strategy, model)
            READS[read](model)
        assert _means(strategy, model) == [pytest.approx([0.57, 0.76]), pytest.approx([2.47, 2.66])]


def test_reads_in_a_transform_change_no_values() -> None:
    with td.MirroredStrategy(TWO) as strategy:
        with strategy.scope():
            model = Normed()
        torch.func.grad(lambda w: (w * model.mean.data).sum())(torch.ones(2))
        assert _means(strategy, model) == [[0.0, 0.0], [0.0, 0.0]]


def _through_numpy(model: Normed) -> None:
    model.mean.data.numpy()[:] = 3.0


def _set(model: Normed) -> None:
    model.mean.data = torch.full((2,), 3.0)


def _set_in_the_same_memory(model: Normed) -> None:
    memory = model.mean.detach().numpy()
    memory[:] = 3.0
    model.mean.data = torch.from_numpy(memory)


def _set_after_a_read(model: Normed) -> None:
    memory = model.mean.data.numpy()
    model.mean.data = torch.from_numpy(memory)
    memory[:] = 3.0


ON_THE_HOST = pytest.mark.cpu_only("arrays are on the host")
WRITES = {
    "in place": lambda model: model.mean.data.fill_(3.0),
    "through numpy": _through_numpy,
    "set": _set,
    "set in the same memory": _set_in_the_same_memory,
    "set after a read": _set_after_a_read,
    "read twice": lambda model: (model.mean.data.fill_(3.0), model.mean.data),
}


@pytest.mark.parametrize(
    "write",
    [pytest.param(name, marks=[] if name in ("in place", "set", "read twice") else ON_THE_HOST) for name in WRITES],
)
def test_what_is_written_reaches_all_replicas(write: str) -> None:
    with td.MirroredStrategy(TWO) as strategy:
        with strategy.scope():
            model = Normed()
        _trained(strategy, model)
        WRITES[write](model)
        assert _means(strategy, model) == [[3.0, 3.0], [3.0, 3.0]]


def test_a_write_of_the_first_replicas_own_value_reaches_the_others() -> None:
    with td.MirroredStrategy(TWO) as strategy:
        with strategy.scope():
            model = Normed()
        strategy.run(lambda: model.mean.fill_(td.get_replica_context().replica_id_in_sync_group))
        model.mean.data.zero_()
        assert _means(strategy, model) == [[0.0, 0.0], [0.0, 0.0]]


def test_statistics_that_are_no_numbers_are_each_replicas_own() -> None:
    with td.MirroredStrategy(TWO) as strategy:
        with strategy.scope():
            model = Normed()
        values = (torch.tensor([torch.nan, 0.0]), torch.tensor([1.0, torch.nan]))
        strategy.run(lambda: model.mean.copy_(values[td.get_replica_context().replica_id_in_sync_group]))
        copy.deepcopy(model)
        first, second = _means(strategy, model)
        assert (first[1], second[0]) == (0.0, 1.0)
