"""The order of an epoch: of datasets that grow, and of samplers that draw, shard or never end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lockstep import make, parts_of, run_workers
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, SubsetRandomSampler, TensorDataset

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError

pytestmark = pytest.mark.timeout(60)


class Buffer(Dataset[int]):
    """Grows from epoch to epoch, as a replay buffer does."""

    def __init__(self) -> None:
        self.data = list(range(5))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> int:
        return self.data[index]

    def grow(self) -> None:
        self.data.extend(range(len(self.data), len(self.data) + 3))


def seen(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("as_loader", [False, True])
def test_an_epoch_has_the_samples_that_are_there_when_it_begins(shuffle: bool, as_loader: bool) -> None:
    buffer = Buffer()
    dataset: Any = DataLoader(buffer, batch_size=4, shuffle=shuffle) if as_loader else buffer
    options = {} if as_loader else {"global_batch_size": 4, "shuffle": shuffle}
    with td.OneDeviceStrategy("cpu") as strategy:
        batches = strategy.experimental_distribute_dataset(dataset, **options)
        for _ in range(3):
            assert sorted(seen(batches)) == list(range(len(buffer)))
            buffer.grow()
            assert len(batches) == -(-len(buffer) // 4)


def test_tensors_of_a_dataset_may_be_others_in_the_next_epoch() -> None:
    data = TensorDataset(torch.arange(4))
    with td.OneDeviceStrategy("cpu") as strategy:
        batches = strategy.experimental_distribute_dataset(data, global_batch_size=4)
        assert seen(batch[0] for batch in batches) == [0, 1, 2, 3]
        data.tensors = (torch.arange(10, 15),)
        assert seen(batch[0] for batch in batches) == [10, 11, 12, 13, 14]


def test_several_workers_are_told_of_a_length_that_changed() -> None:
    def read(worker: Any) -> None:
        buffer = Buffer()
        batches = make(worker, buffer, batch_size=4)
        list(batches)
        buffer.grow()
        list(batches)

    with pytest.raises(InvalidArgumentError, match="had 5 samples when it was distributed and has 8 now"):
        run_workers(2, 1, read)


class Drawn(Sampler[int]):
    """Draws with the global random numbers of Python and numpy, as many samplers do."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        order = list(range(10))
        random.shuffle(order)
        return iter(np.random.permutation(order).tolist())


def test_a_position_in_an_order_of_pythons_random_numbers_goes_on() -> None:
    with td.OneDeviceStrategy("cpu") as strategy:

        def start() -> Any:
            loader = DataLoader(range(10), batch_size=2, sampler=Drawn())  # type: ignore[arg-type]
            return iter(strategy.experimental_distribute_dataset(loader))

        python, array = random.getstate(), np.random.get_state()[1].copy()  # type: ignore[union-attr, index]
        iterator = start()
        head, state = seen([next(iterator) for _ in range(3)]), iterator.state_dict()
        assert random.getstate() == python, "the program's own random numbers go on as before"
        assert np.array_equal(np.random.get_state()[1], array)  # type: ignore[index]
        other = start()
        other.load_state_dict(state)
        assert sorted(head + seen(other)) == list(range(10))


class Endless(Sampler[int]):
    """Its length is the dataset's, but it never ends."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(10)


@pytest.mark.timeout(20)
def test_a_sampler_without_an_end_is_refused() -> None:
    loader = DataLoader(range(10), batch_size=4, sampler=Endless())  # type: ignore[arg-type]
    with td.OneDeviceStrategy("cpu") as strategy, pytest.raises(ValueError, match="must end with its epoch"):
        next(iter(strategy.experimental_distribute_dataset(loader)))


def test_indices_of_numpy_are_whole_numbers() -> None:
    def read(worker: Any) -> Any:
        sampler = SubsetRandomSampler(np.array([1, 3, 5, 7]))  # type: ignore[arg-type]
        loader = DataLoader(range(10), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
        return [parts_of(worker, batch)[0] for batch in make(worker, loader)]

    parts = run_workers(2, 1, read)
    assert sorted(number for worker in parts for part in worker for number in part) == [1, 3, 5, 7]


@pytest.mark.parametrize("index", [True, np.bool_(True), 0.5, "a"])
def test_other_indices_are_refused_on_several_workers(index: Any) -> None:
    def read(worker: Any) -> Any:
        loader = DataLoader(range(10), batch_size=2, sampler=[index])  # type: ignore[arg-type]
        return list(make(worker, loader))

    with pytest.raises(TypeError, match="must yield whole numbers"):
        run_workers(2, 1, read)


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def test_a_sampler_tells_which_samples_there_are() -> None:
    with td.OneDeviceStrategy("cpu") as strategy:
        loader: Any = DataLoader(NoLength(), batch_size=2, sampler=[5, 3, 1])
        assert seen(strategy.experimental_distribute_dataset(loader)) == [5, 3, 1]
        loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2, sampler=[-1, -2, 0])
        assert seen(b[0] for b in strategy.experimental_distribute_dataset(loader)) == [4, 3, 0]


class Sharding(Sampler[int]):
    """One share of several, but no DistributedSampler."""

    def __init__(self, name: str, count: int) -> None:
        self.rank, self.count = 0, count
        setattr(self, name, count)

    def __len__(self) -> int:
        return 12 // self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 12, self.count))


@pytest.mark.parametrize("name", ["num_replicas", "world_size", "num_shards"])
def test_samplers_that_shard_by_themselves_are_refused(name: str) -> None:
    with td.OneDeviceStrategy("cpu") as strategy:
        sampler = Sharding(name, 2)
        loaders: list[Any] = [
            DataLoader(range(12), batch_size=4, sampler=sampler),  # type: ignore[arg-type]
            DataLoader(range(12), batch_sampler=BatchSampler(sampler, 4, False)),  # type: ignore[arg-type]
        ]
        for loader in loaders:
            with pytest.raises(ValueError, match="has a Sharding, so it is already sharded"):
                strategy.experimental_distribute_dataset(loader)
        loader = DataLoader(range(12), batch_size=4, sampler=Sharding(name, 1))  # type: ignore[arg-type]
        assert seen(strategy.experimental_distribute_dataset(loader)) == list(range(12)), "the only share is all"
