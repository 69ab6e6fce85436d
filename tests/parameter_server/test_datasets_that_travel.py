"""Datasets of the strategy on workers: with a helper that they capture, as objects and made by functions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tfstyle_dist as td

pytestmark = pytest.mark.timeout(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
KEYS, BATCH = torch.tensor([0, 1, 3]), 24


class Table:
    """Values by key."""

    def __init__(self, values: list[int], default: int) -> None:
        self.values, self.default = torch.tensor(values), default

    def lookup(self, keys: torch.Tensor) -> torch.Tensor:
        known = keys < len(self.values)
        return torch.where(known, self.values[keys.clamp(max=len(self.values) - 1)], self.default)


class LookedUp(IterableDataset[torch.Tensor]):
    """The same batch again and again, looked up in a table."""

    def __init__(self, table: Table, size: int) -> None:
        self.table, self.size = table, size

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self.table.lookup(torch.stack([KEYS] * self.size))


def total(iterator: Any) -> int:
    return int(next(iterator).sum())


def test_datasets_of_the_strategy_travel(cluster: Any) -> None:
    c = cluster(workers=2, ps=1)
    strategy, table = c.strategy, Table([0, 1, 2], -2)

    def whole() -> Any:
        return strategy.experimental_distribute_dataset(LookedUp(table, BATCH))

    def by_function() -> Any:
        return strategy.distribute_datasets_from_function(
            lambda context: LookedUp(table, context.get_per_replica_batch_size(BATCH))
        )

    for in_scope in (True, False):
        for make in (whole, by_function):
            for given in (make, make()):
                with strategy.scope() if in_scope else nullcontext():
                    iterator = iter(c.coordinator.create_per_worker_dataset(given))
                sums = [c.coordinator.schedule(total, args=(iterator,)) for _ in range(4)]
                assert [remote.get(timeout=30) for remote in sums] == [-BATCH] * 4

    def steps(iterator: Any) -> int:
        def step(batch: torch.Tensor) -> torch.Tensor:
            return table.lookup(batch.clamp(min=0)).sum() + batch.sum()

        return sum(int(strategy.run(step, args=(next(iterator),))) for _ in range(3))

    iterator = iter(c.coordinator.create_per_worker_dataset(whole()))
    assert c.coordinator.schedule(steps, args=(iterator,)).get(timeout=30) == 3 * (BATCH - BATCH)


def test_a_dataset_travels_with_its_options(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    dataset = TensorDataset(torch.arange(6.0))
    shuffled = c.strategy.experimental_distribute_dataset(
        dataset, global_batch_size=4, shuffle=True, seed=3, drop_remainder=True
    )
    loaded = c.strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4))

    def read(iterator: Any) -> list[list[float]]:
        return [part.tolist() for (part,) in iterator]

    here = [part.tolist() for (part,) in shuffled]
    for given, expected in ((shuffled, here), (loaded, [[0, 1, 2, 3], [4, 5]])):
        iterator = iter(c.coordinator.create_per_worker_dataset(given))
        assert c.coordinator.schedule(read, args=(iterator,)).get(timeout=30) == expected


def test_the_next_batch_or_none(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)

    def optionals(iterator: Any, spec: bool) -> list[Any]:
        found: list[Any] = [iterator.get_next_as_optional() for _ in range(3)]
        values = [optional.get_value().tolist() if optional.has_value() else None for optional in found]
        return [*values, found[2].element_spec.shape if spec else None]

    batches = [torch.arange(2), torch.arange(1)]
    distributed = c.strategy.distribute_datasets_from_function(lambda context: batches)
    for given, spec in ((batches, False), (distributed, True)):
        iterator = iter(c.coordinator.create_per_worker_dataset(given))
        seen = c.coordinator.schedule(optionals, args=(iterator, spec)).get(timeout=30)
        assert seen == [[0, 1], [0], None, (None,) if spec else None]
    for wrong in (None, 5):
        with pytest.raises(TypeError, match=f"or a dataset, got {wrong} .*or a function that makes one"):
            c.coordinator.create_per_worker_dataset(wrong)
    assert isinstance(c.strategy, td.ParameterServerStrategy)
