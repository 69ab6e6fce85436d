"""Replicas weigh by the examples of their shares, where these differ: a mean loss trains as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from two_replicas import both_process_models
from uneven_shares import Batch, close, on_one_device, rows, trained, two_by_two

import tfstyle_dist as td

pytestmark = pytest.mark.timeout(120)

# ---- whole trainings ----------------------------------------------------------------------------------------------


@both_process_models
@pytest.mark.parametrize("count", [9, 11])  # last batches of 1 example, so that one replica has none, and of 3
def test_uneven_last_batches_train_as_one_device(strategy: td.Strategy, count: int, process_model: str) -> None:
    data = rows(count)
    loader = DataLoader(TensorDataset(*data), batch_size=8)
    weights, losses = trained(strategy, strategy.experimental_distribute_dataset(loader), epochs=3)
    expected, exact = on_one_device([(data[0][i : i + 8], data[1][i : i + 8]) for i in (0, 8)], epochs=3)
    close(weights, expected)
    assert losses[0] == pytest.approx(exact[0], rel=1e-12)
    assert all(loss == loss for loss in losses)
    if count == 9:  # the one example's replica alone has a loss
        assert losses[1] == pytest.approx(exact[1], rel=1e-9)


@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1", "cpu:2"], ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]])
def test_several_replicas_of_central_storage_train_as_one_device(devices: list[str]) -> None:
    data = rows(10)
    with td.experimental.CentralStorageStrategy(devices) as strategy:
        batches = strategy.experimental_distribute_dataset([(data[0][:5], data[1][:5]), (data[0][5:], data[1][5:])])
        weights, _ = trained(strategy, batches)
    close(weights, on_one_device([(data[0][:5], data[1][:5]), (data[0][5:], data[1][5:])])[0])


on_the_cpu = pytest.mark.cpu_only("central storage between processes computes on the CPU")


@pytest.mark.distributed(workers=3, timeout=90, deadline=30)
@pytest.mark.parametrize("kind", ["mirrored", pytest.param("central", marks=on_the_cpu)])
def test_three_ranks_train_as_one_device(kind: str) -> None:
    torch.set_num_threads(1)
    data = rows(10)  # batches of 6 (2, 2, 2) and 4 (2, 2, 0)
    made = td.MirroredStrategy() if kind == "mirrored" else td.experimental.CentralStorageStrategy()
    with made as strategy:
        batches = strategy.experimental_distribute_dataset(TensorDataset(*data), global_batch_size=6)
        weights, losses = trained(strategy, batches)
        expected, _ = on_one_device([(data[0][:6], data[1][:6]), (data[0][6:], data[1][6:])])
        close(weights, expected)
        assert all(loss == loss for loss in losses)


@two_by_two
@pytest.mark.parametrize("reads", ["its share", "everything", "every batch twice"])
def test_several_workers_of_several_replicas_train_as_one_device(reads: str) -> None:
    """Batches of 8, and of 5: shares of 2, 2, 1 and none."""
    data = rows(13)
    cuts = [(data[0][:8], data[1][:8]), (data[0][8:], data[1][8:])]
    with td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        if reads == "its share":
            batches = strategy.experimental_distribute_dataset(TensorDataset(*data), global_batch_size=8)
        elif reads == "everything":
            batches = strategy.experimental_distribute_dataset(cuts)
        else:
            off = td.data.experimental.AutoShardPolicy.OFF
            batches = strategy.experimental_distribute_dataset(Stream(cuts), auto_shard_policy=off)
        weights, losses = trained(strategy, batches)
        assert all(loss == loss for loss in losses)
        if reads != "every batch twice":
            close(weights, on_one_device(cuts)[0])
            return
        # Every worker reads all and takes two of the four pieces at a time: the examples of a step come twice.
        quarters = [(0, 4), (4, 8), (8, 12), (12, 13)]
        close(weights, on_one_device([(data[0][a:b], data[1][a:b]) for a, b in quarters])[0])


@two_by_two
@pytest.mark.parametrize("map_style", [True, False])
def test_workers_that_read_the_same_train_as_on_the_examples_of_both(map_style: bool) -> None:
    """Pieces of 2, 2, 2, 1 for the one and 2, 1, 2, 2 for the other: a step has 7 examples, as many as a batch."""
    data = rows(13)
    off = td.data.experimental.AutoShardPolicy.OFF
    with td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        if map_style:
            batches = strategy.experimental_distribute_dataset(
                TensorDataset(*data), global_batch_size=7, auto_shard_policy=off
            )
        else:
            cuts = [(data[0][:7], data[1][:7]), (data[0][7:], data[1][7:])]
            batches = strategy.experimental_distribute_dataset(Stream(cuts), auto_shard_policy=off)
        weights, _ = trained(strategy, batches)
    both = [((0, 4), (0, 3)), ((4, 7), (3, 7)), ((7, 11), (7, 10)), ((11, 13), (10, 13))]
    steps = [tuple(torch.cat([part[a:b] for a, b in taken]) for part in data) for taken in both]
    close(weights, on_one_device(steps)[0])


class Stream:
    """Batches whose number is not known in advance."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)


@two_by_two
def test_workers_that_read_pipelines_of_their_own_tell_their_sizes(rank: int) -> None:
    """Worker 0 has batches of 3 and 1 for its replicas, worker 1 one of 2 and then nothing."""
    data = rows(6)
    cuts = [(data[0][a:b], data[1][a:b]) for a, b in [(0, 3), (3, 4), (4, 6)]]
    with td.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        batches = strategy.distribute_datasets_from_function(lambda _: cuts[:2] if rank == 0 else cuts[2:])
        weights, losses = trained(strategy, batches)
        expected, exact = on_one_device([data])
        close(weights, expected)
        each = [on_one_device([cut])[1][0] for cut in cuts]
        assert losses == [pytest.approx(sum(each) / 3)]  # of the three replicas that have examples
        assert exact[0] != pytest.approx(losses[0])
