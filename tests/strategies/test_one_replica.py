"""Values and variables of a strategy with one replica, and where nothing is distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.values import PerReplica

ONE_OF_MANY = [
    lambda: td.MirroredStrategy(["cpu:0"]),
    td.MultiWorkerMirroredStrategy,
    lambda: td.experimental.CentralStorageStrategy(["cpu:0"], "cpu:0"),
]
PLAIN = [lambda: td.OneDeviceStrategy("cpu:0"), td.get_strategy]


@pytest.mark.parametrize("make", ONE_OF_MANY)
def test_values_from_a_function_are_per_replica_also_for_one(make: Any) -> None:
    strategy = make()
    value = strategy.experimental_distribute_values_from_function(
        lambda context: {"a": torch.tensor([1.0, 2.0]) + context.replica_id_in_sync_group, "b": (None, 3)}
    )
    assert isinstance(value["a"], PerReplica)
    assert [entry.values for entry in value["b"]] == [(None,), (3,)]
    # Everything that takes a distributed value takes it.
    assert strategy.run(lambda v: (v["a"].tolist(), v["b"]), args=(value,)) == ([1.0, 2.0], (None, 3))
    assert strategy.reduce("SUM", value["a"], axis=None).tolist() == [1.0, 2.0]
    assert strategy.reduce("MEAN", value["a"], axis=0).item() == 1.5
    assert strategy.gather(value["a"], axis=0).tolist() == [1.0, 2.0]
    assert [v.tolist() for v in strategy.experimental_local_results(value["a"])] == [[1.0, 2.0]]
    assert strategy.extended.reduce_to("SUM", value["a"], "cpu:0").tolist() == [1.0, 2.0]
    with strategy.scope():
        variable = td.Variable(torch.zeros(2))
        strategy.extended.update(variable, lambda copy, x: copy.assign_add(x), args=(value["a"],))
    assert variable.tolist() == [1.0, 2.0]
    strategy.close()


@pytest.mark.parametrize("make", PLAIN)
def test_values_from_a_function_stay_bare_where_nothing_is_distributed(make: Any) -> None:
    value = make().experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    assert value == 0


@pytest.mark.parametrize("make", [*ONE_OF_MANY, lambda: td.MirroredStrategy(["cpu:0", "cpu:1"])])
def test_only_variables_of_the_strategy_can_be_updated(make: Any) -> None:
    strategy = make()
    called: list[Any] = []
    values = strategy.experimental_distribute_values_from_function(lambda context: torch.ones(2))
    for wrong in (3, None, torch.ones(2), [1.0], "name", values, td.Variable(1.0)):
        with pytest.raises(
            ValueError, match=r"can not update this: it takes a variable or parameter of .*, got .*scope"
        ):
            strategy.extended.update(wrong, called.append)
    assert called == []
    with strategy.scope():
        layer = torch.nn.Linear(1, 1)
        variable = td.Variable(1.0)
    for mine in (variable, layer.weight):
        strategy.extended.update(mine, lambda copy: called.append(copy))
    assert len(called) == 2 * (2 if strategy.num_replicas_in_sync == 2 else 1)
    strategy.close()


@pytest.mark.parametrize("make", PLAIN)
def test_anything_is_updated_where_nothing_is_distributed(make: Any) -> None:
    assert make().extended.update(torch.tensor(1.0), lambda value: value + 1).item() == 2.0


@pytest.mark.parametrize("make", [*PLAIN, *ONE_OF_MANY, lambda: td.MirroredStrategy(["cpu:0", "cpu:1"])])
def test_parameters_are_of_the_strategy_on_one_replica_too(make: Any) -> None:
    strategy = make()
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        for owned in (model.weight, td.Variable(0.0)):
            assert strategy.extended.variable_created_in_scope(owned)
            with strategy.extended.colocate_vars_with(owned):  # as optimizers make their slots
                td.Variable(torch.zeros(1, 2))
    elsewhere = td.MirroredStrategy(["cpu:0", "cpu:1"])
    with elsewhere.scope():
        foreign = torch.nn.Linear(2, 1)
    assert not strategy.extended.variable_created_in_scope(foreign.weight)
    with pytest.raises(ValueError, match="belongs to another strategy"):
        strategy.extended.colocate_vars_with(torch.ones(2)).__enter__()
    elsewhere.close()
    strategy.close()
