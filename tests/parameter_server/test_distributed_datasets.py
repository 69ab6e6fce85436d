"""Distributed datasets of the strategy as per-worker datasets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as td

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def loader() -> Any:
    return DataLoader(TensorDataset(torch.arange(1, 11)), batch_size=4)


def of_context(context: Any) -> Any:
    return [torch.tensor([context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync])]


MADE: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "a loader": (lambda s: s.experimental_distribute_dataset(loader()), [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]),
    "batches": (lambda s: s.experimental_distribute_dataset([torch.arange(3), torch.arange(2)]), [[0, 1, 2], [0, 1]]),
    "samples": (
        lambda s: s.experimental_distribute_dataset(
            TensorDataset(torch.arange(5)), global_batch_size=2, drop_remainder=True
        ),
        [[0, 1], [2, 3]],
    ),
    "a function": (lambda s: s.distribute_datasets_from_function(of_context), [[1, 0, 1]]),
}


def batches_of(iterator: Any) -> list[Any]:
    return [(batch[0] if isinstance(batch, tuple | list) else batch).tolist() for batch in iterator]


def test_each_worker_reads_a_whole_copy(cluster: Any) -> None:
    """Given itself, made by the function, or inside of it."""
    c = cluster(workers=2, ps=1)
    strategy, coordinator = c.strategy, c.coordinator
    for make, expected in MADE.values():
        dataset = make(strategy)
        for given in (dataset, lambda make=make: make(strategy), lambda dataset=dataset: dataset):
            iterator = iter(coordinator.create_per_worker_dataset(given))
            got = [coordinator.schedule(batches_of, args=(iterator,), worker=worker) for worker in (0, 1)]
            assert coordinator.fetch(got) == [expected, expected]
    # A dataset of another strategy has no place there.
    other = td.MirroredStrategy(["cpu:0"]).experimental_distribute_dataset([torch.ones(2)])
    with pytest.raises(TypeError, match="of another strategy"):
        coordinator.create_per_worker_dataset(other)
