"""Options and numbers of another kind than is asked for: refused with what was given, or taken where they mean it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tfstyle_dist as td
from tfstyle_dist.data.experimental import AutoShardPolicy, DistributeOptions

FOUR = TensorDataset(torch.arange(4.0))


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, policy: Any) -> None:
        self.auto_shard_policy = policy

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.arange(4.0)])


@pytest.fixture
def two() -> Iterator[td.Strategy]:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sampler", "Leave the line out.*an epoch in a new order if the dataset is shuffled"),
        ("batch_sampler", "Leave the line out"),
        ("set_epoch", "Leave the line out.*without a DistributedSampler"),
        ("dataset", r"Keep the DataLoader that you gave.*len\(loader.dataset\) counts the examples of all replicas"),
        ("batch_size", "Keep the DataLoader that you gave.*that of all replicas together"),
        ("num_workers", "Keep the DataLoader that you gave"),
    ],
)
def test_what_scripts_ask_a_loader_for(two: td.Strategy, name: str, words: str) -> None:
    batches = two.experimental_distribute_dataset(DataLoader(FOUR, batch_size=2))
    with pytest.raises(AttributeError, match=f"'DistributedDataset' object has no attribute '{name}': it is.*{words}"):
        getattr(batches, name)
    assert not hasattr(batches, name)
    with pytest.raises(AttributeError, match=r"^'DistributedDataset' object has no attribute 'sampled'$"):
        _ = batches.sampled


def test_what_a_property_raises_is_not_hidden(two: td.Strategy) -> None:
    class Broken(Stream):
        def __iter__(self) -> Iterator[torch.Tensor]:
            raise AttributeError("the reader has no file")

    batches = two.experimental_distribute_dataset(Broken(AutoShardPolicy.OFF))
    with pytest.raises(AttributeError, match="the reader has no file"):
        _ = batches.element_spec


@pytest.mark.parametrize("policy", ["DATA", 2, None])
def test_a_policy_is_an_auto_shard_policy(two: td.Strategy, policy: Any) -> None:
    with pytest.raises(TypeError, match=f"must be an AutoShardPolicy, got {policy!r}.*write e.g. AutoShardPolicy.OFF"):
        two.experimental_distribute_dataset([torch.arange(4.0)], auto_shard_policy=policy)
    with pytest.raises(TypeError, match=f"must be an AutoShardPolicy, got {policy!r}"):
        DistributeOptions().auto_shard_policy = policy


def test_the_attribute_of_a_dataset_is_a_policy_or_its_number(two: td.Strategy) -> None:
    with pytest.raises(TypeError, match="attribute auto_shard_policy of Stream must be an AutoShardPolicy, got 'OFF'"):
        two.experimental_distribute_dataset(Stream("OFF"))
    assert two.experimental_distribute_dataset(Stream(-1)).shard_report().policy is AutoShardPolicy.OFF


def test_an_option_that_is_none_is_not_set_in_silence() -> None:
    options = DistributeOptions()
    with pytest.raises(AttributeError, match=r"no option 'autoshard'.*auto_shard_policy and num_devices"):
        options.autoshard = AutoShardPolicy.OFF  # type: ignore[attr-defined]
    options.auto_shard_policy, options.num_devices = AutoShardPolicy.OFF, 2
    assert (options.auto_shard_policy, options.num_devices) == (AutoShardPolicy.OFF, 2)


def test_distribute_options_are_no_input_options(two: td.Strategy) -> None:
    with pytest.raises(TypeError, match="is auto_shard_policy= of experimental_distribute_dataset"):
        two.experimental_distribute_dataset([torch.arange(4.0)], DistributeOptions())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("experimental_replication_mode", "PER_REPLICA", "must be an InputReplicationMode, got 'PER_REPLICA'"),
        ("experimental_fetch_to_device", "no", "must be True or False, got 'no'"),
        ("experimental_place_dataset_on_device", None, "must be True or False, got None"),
        ("experimental_per_replica_buffer_size", None, "must be a whole number, got NoneType: None"),
        ("experimental_per_replica_buffer_size", 1.5, "must be a whole number, got float: 1.5"),
        ("experimental_per_replica_buffer_size", True, "must be a whole number, got bool: True"),
    ],
)
def test_input_options_of_another_kind(name: str, value: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"{name} {says}"):
        td.InputOptions(**{name: value})


def test_whole_numbers_of_numpy_and_torch(two: td.Strategy) -> None:
    assert td.InputOptions(experimental_per_replica_buffer_size=np.int64(2)).experimental_per_replica_buffer_size == 2
    for size in (np.int64(2), torch.tensor(2)):
        assert len(two.experimental_distribute_dataset(FOUR, global_batch_size=size)) == 2  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a whole number, got float: 2\.0"):
        two.experimental_distribute_dataset(FOUR, global_batch_size=2.0)  # type: ignore[arg-type]


def test_the_share_of_any_number() -> None:
    context = td.InputContext(num_replicas_in_sync=4)
    share: Any = context.get_per_replica_batch_size
    assert [share(size) for size in (8, np.int64(8), 0, -4)] == [2, 2, 0, -1]
    assert torch.equal(share(torch.tensor(8)), torch.tensor(2))
    for size in ("8", None, [8]):
        with pytest.raises(TypeError, match=f"must be a number, got {type(size).__name__}.*get_per_replica_batch_size"):
            share(size)


def test_an_optional_says_how_its_batch_looks(two: td.Strategy) -> None:
    dataset = two.experimental_distribute_dataset(DataLoader(FOUR, batch_size=4))
    iterator = iter(dataset)
    optionals = [iterator.get_next_as_optional() for _ in range(2)]
    assert [optional.has_value() for optional in optionals] == [True, False]
    for optional in optionals:
        (spec,) = optional.element_spec
        assert [part.shape for part in two.experimental_local_results(spec)] == [(None,), (None,)]
    with pytest.raises(ValueError, match="made without a dataset"):
        assert td.input.Optional().element_spec
