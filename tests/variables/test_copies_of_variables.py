"""Variables that are copied with ``copy.deepcopy``, and variables that are given a value for each replica."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError

ON_READ, ON_WRITE = td.VariableSynchronization.ON_READ, td.VariableSynchronization.ON_WRITE
NONE, SUM = td.VariableAggregation.NONE, td.VariableAggregation.SUM
MEAN, FIRST = td.VariableAggregation.MEAN, td.VariableAggregation.ONLY_FIRST_REPLICA


def mirrored(replicas: int = 2) -> Any:
    return td.MirroredStrategy([f"cpu:{r}" for r in range(replicas)])


STRATEGIES = {
    "one device": lambda: td.OneDeviceStrategy("cpu"),
    "one replica": lambda: mirrored(1),
    "three replicas": lambda: mirrored(3),
    "central": lambda: td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


def copies(strategy: Any, variable: td.Variable) -> list[float]:
    return [float(value) for value in strategy.experimental_local_results(variable)]


@pytest.mark.parametrize("within", [True, False], ids=["in the scope", "outside"])
@pytest.mark.parametrize(
    ("synchronization", "aggregation"), list(itertools.product((ON_READ, ON_WRITE), (SUM, MEAN, FIRST))), ids=str
)
@pytest.mark.parametrize("make", list(STRATEGIES.values()), ids=list(STRATEGIES))
def test_a_copy_is_a_variable_of_the_strategy(make: Any, synchronization: Any, aggregation: Any, within: bool) -> None:
    strategy = make()
    with strategy.scope():
        variable = td.Variable(
            1.0, name="v", synchronization=synchronization, aggregation=aggregation, constraint=torch.abs
        )
        twin = copy.deepcopy(variable)
    twin = twin if within else copy.deepcopy(variable)
    assert type(twin) is type(variable)
    for name in ("name", "trainable", "constraint", "synchronization", "aggregation", "dtype", "requires_grad"):
        assert getattr(twin, name) == getattr(variable, name), name
    twin.assign(torch.tensor(6.0))
    strategy.run(lambda: twin.assign(torch.tensor(6.0)))
    assert set(copies(strategy, variable)) == {1.0}
    assert len(copies(strategy, twin)) == len(copies(strategy, variable))


def test_each_copy_of_the_copy_has_its_own_value() -> None:
    strategy = mirrored()
    with strategy.scope():
        variable = td.Variable(0.0, synchronization=ON_READ, aggregation=MEAN)
    strategy.run(lambda: variable.assign(torch.tensor(float(td.get_replica_context().replica_id_in_sync_group))))
    twin = copy.deepcopy(variable)
    assert copies(strategy, twin) == [0.0, 1.0]
    assert float(twin) == 0.5


def test_a_copy_outside_of_every_strategy() -> None:
    variable = td.Variable([1.0, 2.0], name="plain", trainable=False)
    twin = copy.deepcopy(variable)
    assert twin.assign_add([1.0, 1.0]).tolist() == [2.0, 3.0]
    assert variable.tolist() == [1.0, 2.0]
    assert (twin.name, twin.trainable) == ("plain", False)


def test_a_variable_that_two_names_share_is_copied_once() -> None:
    variable = td.Variable(1.0)
    one, other = copy.deepcopy([variable, variable])
    assert one is other


def test_a_copy_inside_of_run_is_a_plain_tensor() -> None:
    strategy = mirrored()
    with strategy.scope():
        variable = td.Variable(1.0, aggregation=SUM)
    given = strategy.run(lambda: copy.deepcopy(variable))
    assert not any(isinstance(value, td.Variable) for value in given.values)
    assert [float(value.detach()) for value in given.values] == [1.0, 1.0]


class Scaled(torch.nn.Module):
    """A module with a variable beside a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = td.Variable([1.0, 2.0], aggregation=MEAN)
        self.inner = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.inner(x * self.scale))


@pytest.mark.parametrize("within", [True, False], ids=["in the scope", "outside"])
def test_a_module_with_a_variable_is_trained_and_its_copy_stays(within: bool) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = Scaled()
        teacher = copy.deepcopy(model) if within else None
    teacher = (teacher or copy.deepcopy(model)).requires_grad_(False)
    assert isinstance(teacher.scale, td.Variable)
    assert not teacher.scale.requires_grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        (model(x) - teacher(x) + 1.0).square().mean().backward()
        optimizer.step()
        return teacher(x)

    strategy.run(step, args=(torch.ones(3, 2),))
    assert teacher.scale.tolist() == [1.0, 2.0]
    assert model.scale.tolist() != [1.0, 2.0]
    rows = [value.tolist() for value in strategy.experimental_local_results(model.scale)]
    assert rows[0] == rows[1]


# ---- a value for each replica -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [(SUM, [5.0, 5.0]), (MEAN, [2.5, 2.5]), (FIRST, [2.0, 2.0]), (NONE, [2.0, 3.0])],
    ids=str,
)
@pytest.mark.parametrize("op", ["assign", "assign_add", "assign_sub"])
def test_a_replica_takes_its_own_of_values_that_it_was_not_given(op: str, aggregation: Any, expected: Any) -> None:
    strategy = mirrored()
    sign = -1.0 if op == "assign_sub" else 1.0
    own = strategy.experimental_distribute_values_from_function(
        lambda context: torch.tensor(sign * (2.0 + context.replica_id_in_sync_group))
    )
    with strategy.scope():
        variable = td.Variable(0.0, aggregation=aggregation)
    strategy.run(lambda: getattr(variable, op)(own))
    assert copies(strategy, variable) == expected


def test_under_central_storage() -> None:
    strategy = STRATEGIES["central"]()
    own = td.values.PerReplica((torch.tensor(2.0), torch.tensor(3.0)))
    with strategy.scope():
        variable = td.Variable(0.0, aggregation=SUM)
    strategy.run(lambda: variable.assign(own))
    assert copies(strategy, variable) == [5.0]


@pytest.mark.parametrize("inside", [True, False])
def test_too_few_values_are_named(inside: bool) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        variable = td.Variable(0.0, aggregation=MEAN)
    few = td.values.PerReplica((torch.tensor(1.0), torch.tensor(2.0)))
    with pytest.raises(InvalidArgumentError, match=r"has 2 value\(s\) for 3 local replicas; give one for each"):
        strategy.run(lambda: variable.assign(few)) if inside else variable.assign(few)


def test_numbers_and_arrays_of_each_copy() -> None:
    strategy = mirrored()
    with strategy.scope():
        variable = td.Variable(2.0, aggregation=MEAN)
    for component in variable.values:
        array = component.numpy()
        assert (float(component), int(component), complex(component), array.item()) == (2.0, 2, 2.0 + 0.0j, 2.0)
        array += 1.0
    assert copies(strategy, variable) == [2.0, 2.0]
