"""A sum that the user defines is what sums gradients, values, variables and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as td

TWO = ["cpu:0", "cpu:1"]


class TenTimes(td.CrossDeviceOps):
    """Ten times the sum, so that it is told apart from every other one."""

    def sum_values(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return 10 * sum(values[1:], start=values[0])


def ten_times(values: list[torch.Tensor]) -> torch.Tensor:
    return TenTimes().sum_values(values)


OPS: dict[str, Callable[[], td.CrossDeviceOps]] = {
    "subclass": TenTimes,
    "accumulation_fn": lambda: td.ReductionToOneDevice(accumulation_fn=ten_times),
}


def replica() -> Any:
    context = td.get_replica_context()
    assert context is not None
    return context


def check_everything(strategy: td.Strategy) -> None:
    """Each replica gives its number plus 1; the sum of all is ``total``."""
    count = strategy.num_replicas_in_sync
    total = 10.0 * sum(range(1, count + 1))
    with strategy.scope():
        dense = nn.Linear(2, 1, bias=False)
        norm = nn.BatchNorm1d(1)
        rows = nn.Embedding(4, 2, sparse=True)
        variable = td.Variable(torch.zeros(2), aggregation=td.VariableAggregation.SUM)
        read = td.Variable(
            0.0, synchronization=td.VariableSynchronization.ON_READ, aggregation=td.VariableAggregation.MEAN
        )
    sgd = td.train.GradientDescentOptimizer(1.0)

    def mine() -> float:
        return float(replica().replica_id_in_sync_group + 1)

    def local(value: Any) -> list[Any]:
        return [v.tolist() for v in strategy.experimental_local_results(value)]

    def backward() -> Any:
        dense.zero_grad()
        rows.zero_grad()
        (dense(torch.full((1, 2), mine())).sum() + rows(torch.tensor([1])).sum() * mine()).backward()
        assert rows.weight.grad is not None
        return [dense.weight.grad, rows.weight.grad.to_dense()]

    for _ in range(2):
        gradient, sparse = strategy.run(backward)
        assert all(g == [[total / count] * 2] for g in local(gradient))
        assert all(g == [[0, 0], [total / count] * 2, [0, 0], [0, 0]] for g in local(sparse))

    before = dense.weight.detach().clone()
    strategy.run(lambda: sgd.minimize((dense.weight * mine()).sum(), var_list=[dense.weight]))
    torch.testing.assert_close(before - dense.weight.detach(), torch.full((1, 2), total))

    value = strategy.run(lambda: torch.tensor(mine()))
    assert strategy.reduce("SUM", value, axis=None).item() == total
    assert strategy.reduce("MEAN", value, axis=None).item() == total / count
    assert local(strategy.run(lambda: replica().all_reduce("SUM", torch.tensor(mine())))) == [total] * len(local(value))

    strategy.run(lambda: variable.assign_add(torch.full((2,), mine())))
    assert variable.tolist() == [total] * 2
    strategy.run(lambda: read.assign(mine()))
    assert float(read.read_value()) == total / count

    def fill() -> None:
        assert norm.running_mean is not None
        norm.running_mean.fill_(mine())

    strategy.run(fill)
    strategy.sync_buffers()
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [total / count]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("devices", [TWO, ["cpu:0", "cpu:1", "cpu:2"]])
def test_replicas_of_one_process(name: str, devices: list[str]) -> None:
    with td.MirroredStrategy(devices, cross_device_ops=OPS[name]()) as strategy:
        check_everything(strategy)


@pytest.mark.distributed(workers=2)
@pytest.mark.parametrize("name", OPS)
def test_ranks(name: str) -> None:
    with td.MirroredStrategy(cross_device_ops=OPS[name]()) as strategy:
        check_everything(strategy)


@pytest.mark.distributed(workers=2)
def test_two_replicas_on_each_of_two_ranks() -> None:
    with td.MirroredStrategy(TWO, cross_device_ops=TenTimes()) as strategy:
        check_everything(strategy)


def test_the_ops_of_the_package_leave_the_sums_to_it() -> None:
    for ops in (
        td.CrossDeviceOps(),
        td.ReductionToOneDevice("cpu:0"),
        td.HierarchicalCopyAllReduce(),
        td.NcclAllReduce(),
    ):
        assert ops.own_sum is None


def trained_bits(ops: td.CrossDeviceOps | None) -> list[float]:
    with td.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"], cross_device_ops=ops) as strategy:
        torch.manual_seed(3)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))

        def step() -> torch.Tensor:
            model(torch.full((2, 3), 0.1 + replica().replica_id_in_sync_group)).square().sum().backward()
            return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])

        first: torch.Tensor = strategy.experimental_local_results(strategy.run(step))[0]
        return first.tolist()


def test_the_all_reduce_ops_are_what_they_say() -> None:
    """``NcclAllReduce`` chooses nothing, ``HierarchicalCopyAllReduce`` a tree; packs change no bit."""
    tree = td.ReductionToOneDevice(aggregation_method=td.AggregationMethod.TREE)
    plain, by_tree = trained_bits(None), trained_bits(tree)
    assert plain != by_tree
    for packs in (0, 1, 3):
        assert trained_bits(td.NcclAllReduce(num_packs=packs)) == plain
        assert trained_bits(td.HierarchicalCopyAllReduce(num_packs=packs)) == by_tree


@pytest.mark.parametrize("wrong", [None, 3.0, torch.ones(7)])
def test_a_sum_of_another_shape_is_refused(wrong: Any) -> None:
    ops = td.ReductionToOneDevice(accumulation_fn=lambda values: wrong)
    with td.MirroredStrategy(TWO, cross_device_ops=ops) as strategy:
        with strategy.scope():
            layer = nn.Linear(2, 1, bias=False)
        message = r"sum that ReductionToOneDevice makes must be a tensor of the shape of each value, .*, got "
        with pytest.raises(TypeError, match=message):
            strategy.run(lambda: layer(torch.ones(1, 2)).sum().backward())
        with pytest.raises(TypeError, match=message):
            strategy.reduce("SUM", strategy.run(lambda: torch.ones(2)), axis=None)


@pytest.mark.parametrize("other", [torch.ones(2, dtype=torch.int32), torch.ones(1), torch.ones(2, 1)])
def test_what_differs_from_replica_to_replica_is_not_given_to_the_function(other: torch.Tensor) -> None:
    ops = td.ReductionToOneDevice(accumulation_fn=lambda tensors: tensors[0] + tensors[1].sum())
    with td.MirroredStrategy(TWO, cross_device_ops=ops) as strategy:
        parts = strategy.experimental_distribute_values_from_function(
            lambda context: other if context.replica_id_in_sync_group else torch.ones(2)
        )
        with pytest.raises(td.errors.InvalidArgumentError, match=r"contribution 1 has shape .* give tensors that are"):
            strategy.reduce("SUM", parts, axis=None)
        with pytest.raises(td.errors.InvalidArgumentError, match=r"contribution 1 has shape .* give tensors that are"):
            ops.reduce(td.ReduceOp.SUM, parts, "cpu:0")
