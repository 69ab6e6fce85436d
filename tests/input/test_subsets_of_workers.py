"""A dataset that each worker divided for itself is refused: dividing it again would lose samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

import tfstyle_dist as td

DATA = TensorDataset(torch.arange(16.0))


def batches(strategy: td.Strategy, dataset: Dataset[Any], **options: Any) -> list[float]:
    found = strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4), **options)
    return [value for (x,) in found for value in strategy.gather(x, axis=0).tolist()]


@pytest.mark.distributed(workers=2)
def test_subsets_that_differ(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        with pytest.raises(td.errors.InvalidArgumentError, match=r"worker 1: indices of the Subset \[1, 3, 5, 7\]"):
            batches(strategy, Subset(DATA, range(rank, 16, 2)))
        torch.manual_seed(rank)
        with pytest.raises(td.errors.InvalidArgumentError, match="Give random_split a generator that is seeded alike"):
            batches(strategy, random_split(DATA, [8, 8])[0])
        with pytest.raises(td.errors.InvalidArgumentError, match="indices of the Subset None"):
            batches(strategy, Subset(DATA, range(16)) if rank else DATA)


@pytest.mark.distributed(workers=2)
def test_subsets_that_are_alike_or_meant_to_differ(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        part = random_split(DATA, [8, 8], generator=torch.Generator().manual_seed(3))[0]
        assert sorted(batches(strategy, part)) == sorted(map(float, part.indices))
        own = Subset(DATA, range(rank, 16, 2))
        assert len(batches(strategy, own, auto_shard_policy=td.AutoShardPolicy.OFF)) == 16
