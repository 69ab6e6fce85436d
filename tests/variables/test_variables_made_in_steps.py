"""Variables that a step makes where there is none yet; the numbers are what TensorFlow 2.21 gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfstyle_dist as tfd
from tfstyle_dist import VariableAggregation, VariableSynchronization

ON_READ = VariableSynchronization.ON_READ
SUM = VariableAggregation.SUM

FORMS = {
    "two": lambda: tfd.MirroredStrategy(["cpu:0", "cpu:1"]),
    "three": lambda: tfd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
    "central": lambda: tfd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


@pytest.fixture(params=FORMS)
def strategy(request: pytest.FixtureRequest) -> Any:
    with FORMS[request.param]() as made:
        yield made


def replica() -> int:
    context = tfd.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


class Totals:
    """Sums by name, and a list of them in the order in which they came."""

    def __init__(self) -> None:
        self.by_name: dict[str, tfd.Variable] = {}
        self.all: list[tfd.Variable] = []

    def add(self, name: str, value: float) -> None:
        if name not in self.by_name:
            self.by_name[name] = tfd.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
            self.all.append(self.by_name[name])
        self.by_name[name].assign_add(torch.tensor(value))


def step_of(totals: Totals, late: bool) -> None:
    totals.add("loss", 1.0 + replica())
    totals.add("hits", 2.0)
    if late:
        totals.add("late", 3.0)


def test_a_list_that_a_step_fills_where_it_is_empty(strategy: tfd.Strategy) -> None:
    totals, count = Totals(), strategy.num_replicas_in_sync
    for late in (False, True, True):
        strategy.run(step_of, args=(totals, late))
    assert len(totals.all) == len(totals.by_name) == 3, "one variable for all replicas, in the list once"
    losses = sum(1.0 + r for r in range(count))
    assert [float(v.read_value()) for v in totals.all] == [3 * losses, 6.0 * count, 6.0 * count]


@pytest.mark.distributed(workers=2, timeout=60)
def test_two_workers_of_two_replicas(rank: int) -> None:
    with tfd.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        totals = Totals()
        for late in (False, True):
            strategy.run(step_of, args=(totals, late))
        assert [float(v.read_value()) for v in totals.all] == [20.0, 16.0, 12.0]
        firsts = strategy.run(lambda: tfd.Variable(float(10 * rank + replica())))
        assert [float(v) for v in strategy.experimental_local_results(firsts)] == [0.0, 0.0], "the chief's first value"


@pytest.mark.parametrize("meets", [False, True])
def test_the_first_value_is_the_first_replica_s(strategy: tfd.Strategy, meets: bool) -> None:
    """After replicas have met, the last of them goes on first."""

    def step() -> tuple[tfd.Variable, tfd.Variable]:
        context = tfd.get_replica_context()
        if meets:
            context.all_reduce("SUM", torch.ones(1))
        first = tfd.Variable(5.0 + replica(), name="first")
        if meets:
            context.merge_call(lambda strategy: None)
        return first, tfd.Variable(lambda: 7.0 + replica(), name="second")

    for _ in range(2):
        first, second = strategy.run(step)
        assert [float(v) for v in strategy.experimental_local_results(first)] == [5.0] * len(
            strategy.experimental_local_results(first)
        )
        assert float(second) == 7.0


def test_what_only_the_first_replica_makes(strategy: tfd.Strategy) -> None:
    made = strategy.run(lambda: tfd.Variable(1.0) if replica() == 0 else None)
    assert [value is None for value in made.values] == [False] + [True] * (strategy.num_replicas_in_sync - 1)


def test_what_only_another_replica_makes(strategy: tfd.Strategy) -> None:
    with pytest.raises(RuntimeError, match="variable creation"):
        strategy.run(lambda: tfd.Variable(1.0) if replica() == 1 else None)
    assert float(strategy.run(lambda: tfd.Variable(2.0))) == 2.0, "the strategy stays usable"


def test_a_first_value_that_raises(strategy: tfd.Strategy) -> None:
    def fails() -> torch.Tensor:
        raise KeyError("no value")

    with pytest.raises(KeyError, match="no value"):
        strategy.run(lambda: tfd.Variable(fails))


def test_names_are_compared_with_those_of_the_first_replica() -> None:
    with FORMS["three"]() as strategy, pytest.raises(RuntimeError, match="'b' with mismatching name on replica 2"):
        strategy.run(lambda: tfd.Variable(1.0, name="b" if replica() == 2 else "a"))
