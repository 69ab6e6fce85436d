"""Distributed datasets in two processes of one replica each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.input import FileDataset

TEN = TensorDataset(torch.arange(10.0))
two_ranks = pytest.mark.distributed(workers=2, timeout=60, deadline=20)


class Endless(IterableDataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(self.size)).unbind())


def everywhere(strategy: td.Strategy, mine: Any) -> list[Any]:
    return strategy.worker.group.gather_objects(mine, "results of a test")


@two_ranks
def test_a_shuffled_loader_is_divided_and_comes_anew(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        torch.manual_seed(100 + rank)  # the order must not depend on each rank's own random numbers
        batches = strategy.experimental_distribute_dataset(DataLoader(TEN, batch_size=4, shuffle=True))
        epochs = [[x for (part,) in batches for x in part.tolist()] for _ in range(2)]
        both = everywhere(strategy, epochs)
    for epoch in range(2):
        assert sorted(both[0][epoch] + both[1][epoch]) == [float(i) for i in range(10)]
    assert both[0][0] != both[0][1]


@two_ranks
def test_a_sampler_of_the_users_is_drawn_once(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        torch.manual_seed(rank)
        sampler = RandomSampler(TEN, replacement=True, num_samples=7)
        batches = strategy.experimental_distribute_dataset(DataLoader(TEN, batch_size=3, sampler=sampler))
        sizes = [len(part) for (part,) in batches]
        assert len(batches) == 3
    assert sizes == ([2, 2, 1] if rank == 0 else [1, 1, 0])


@two_ranks
def test_own_files_of_unequal_length_end_together(rank: int, tmp_path_factory: Any, shared_tmp_path: Path) -> None:
    with td.MirroredStrategy() as strategy:
        if rank == 0:
            (shared_tmp_path / "a").write_text("1\n2\n3\n4\n5\n")
            (shared_tmp_path / "b").write_text("")
        strategy.worker.group.gather_objects(0, "files are written")
        files = FileDataset([shared_tmp_path / "a", shared_tmp_path / "b"], decode=float)
        batches = strategy.experimental_distribute_dataset(files, global_batch_size=4)
        steps, sums = [], []
        for batch in batches:
            steps.append(batch.tolist())
            sums.append(float(strategy.reduce("SUM", batch, axis=0)))
        assert batch.dtype is torch.float64  # told by rank 0 to rank 1, which read nothing
    assert steps == ([[1.0, 2.0], [3.0, 4.0], [5.0]] if rank == 0 else [[], [], []])
    assert sums == [3.0, 7.0, 5.0]


@two_ranks
def test_pipelines_of_unequal_length_end_together(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        stream = strategy.distribute_datasets_from_function(lambda c: DataLoader(Endless(5 - 3 * rank), batch_size=2))
        assert [b.tolist() for b in stream] == ([[0, 1], [2, 3], [4]] if rank == 0 else [[0, 1], [], []])


@two_ranks
def test_different_datasets_are_told(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        with pytest.raises(InvalidArgumentError, match="worker 1: samples 9"):
            strategy.experimental_distribute_dataset(TensorDataset(torch.zeros(10 - rank)), global_batch_size=2)
        stream = strategy.experimental_distribute_dataset(Endless(4 + rank), global_batch_size=2)
        with pytest.raises(InvalidArgumentError, match="different batches"):
            list(stream)


@two_ranks
def test_a_position_saved_by_two_ranks_goes_on_in_one_process(rank: int) -> None:
    def of(strategy: td.Strategy) -> Any:
        return strategy.experimental_distribute_dataset(TEN, global_batch_size=3, shuffle=True, seed=5)

    with td.MirroredStrategy() as strategy:
        iterator = iter(of(strategy))
        seen = [x for _ in range(2) for x in next(iterator)[0].tolist()]
        state = iterator.state_dict()
        head = [x for part in everywhere(strategy, seen) for x in part]
    with td.OneDeviceStrategy("cpu") as alone:
        batches = iter(of(alone))
        batches.load_state_dict(state)
        tail = [x for (part,) in batches for x in part.tolist()]
    assert sorted(head + tail) == [float(i) for i in range(10)]


@two_ranks
def test_exact_mean_counts_every_example(rank: int) -> None:
    values = [torch.tensor(1.0), torch.tensor(2.0)] if rank == 0 else [torch.tensor(5.0), torch.tensor(float("nan"))]
    counts = [3, 1] if rank == 0 else [1, 0]
    with td.MirroredStrategy() as strategy:
        exact = td.experimental.exact_mean
        assert float(exact(values, counts, strategy=strategy)) == 2.0
        with strategy.scope():
            assert float(exact(values, counts)) == 2.0
        assert float(strategy.run(lambda: exact(values, counts))) == 2.0
        with pytest.raises(RuntimeError, match="outside of every scope"):
            exact(values, counts)


@two_ranks
def test_a_position_in_own_files_fits_the_same_workers_only(rank: int, shared_tmp_path: Path) -> None:
    with td.MirroredStrategy() as strategy:
        if rank == 0:
            for name, lines in (("a", "1\n2\n3\n4\n5\n"), ("b", "6\n7\n8\n")):
                (shared_tmp_path / name).write_text(lines)
        strategy.worker.group.gather_objects(0, "files are written")
        files = FileDataset([shared_tmp_path / "a", shared_tmp_path / "b"], decode=float)
        batches = strategy.experimental_distribute_dataset(files, global_batch_size=4)
        iterator = iter(batches)
        head = [next(iterator).tolist() for _ in range(2)]
        state = iterator.state_dict()
        again = iter(batches)
        again.load_state_dict(state)
        tail = [b.tolist() for b in again]
        both = everywhere(strategy, state)
    assert both[0] == both[1]
    assert head + tail == ([[1, 2], [3, 4], [5]] if rank == 0 else [[6, 7], [8], []])
    with td.OneDeviceStrategy("cpu") as alone:
        other = iter(alone.experimental_distribute_dataset(files, global_batch_size=4))
        with pytest.raises(ValueError, match=r"saved with 2 worker\(s\)"):
            other.load_state_dict(state)
