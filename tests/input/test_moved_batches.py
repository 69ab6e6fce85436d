"""What is not a tensor in a batch, batches that are read ahead of an error, and garbage beside loader processes."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset

import tfstyle_dist as td
from tfstyle_dist.input.split import leaves_of, map_leaves

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def one() -> Iterator[td.Strategy]:
    with td.OneDeviceStrategy("cpu") as strategy:
        yield strategy


def place_of(strategy: td.Strategy) -> torch.device:
    return strategy.worker.torch_device(0)


class Encoding(UserDict):  # type: ignore[type-arg]
    """As a tokenizer's: a mapping with something beside its entries."""

    def __init__(self, data: dict[str, Any], words: list[str]) -> None:
        super().__init__(data)
        self.words = words


class Fixed(Mapping[str, torch.Tensor]):
    """Cannot be written to, and is not made from a dict."""

    def __init__(self, *, x: torch.Tensor) -> None:
        self._entries = {"x": x}

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Graph:
    """An object with a method ``to``, as those of torch_geometric."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


class Holder(Graph):
    """Moves what it has in place, and returns nothing."""

    def to(self, device: torch.device) -> None:  # type: ignore[override]
        self.nodes = self.nodes.to(device)


def test_a_mapping_keeps_its_class_and_what_else_it_has() -> None:
    given = {"a": Encoding({"x": torch.ones(2)}, ["one", "two"]), "b": [Fixed(x=torch.ones(3))]}
    doubled = map_leaves(lambda leaf: leaf * 2, given)
    assert type(doubled["a"]) is Encoding
    assert (doubled["a"].words, doubled["a"]["x"].tolist()) == (["one", "two"], [2.0, 2.0])
    assert given["a"]["x"].tolist() == [1.0, 1.0], "the one that was given stays as it is"
    assert doubled["b"][0] == {"x": doubled["b"][0]["x"]}, "a dict where its class can make none, as a DataLoader does"
    assert [leaf.tolist() for leaf in leaves_of(given)] == [[1.0, 1.0], [1.0, 1.0, 1.0]]


def test_objects_and_packed_sequences_come_to_the_device(one: td.Strategy) -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    batches = [{"graph": Graph(torch.ones(2)), "held": Holder(torch.ones(2)), "packed": packed, "names": ["a", "b"]}]
    (batch,) = one.experimental_distribute_dataset(batches)
    assert batch["graph"].nodes.device == batch["held"].nodes.device == place_of(one)
    assert isinstance(batch["packed"], PackedSequence)
    assert batch["packed"].data.device == place_of(one)
    assert batch["packed"].batch_sizes.device.type == "cpu", "as torch wants it"
    assert batch["names"] == ["a", "b"]


def test_a_packed_sequence_is_not_cut() -> None:
    batches = [pack_sequence([torch.ones(3), torch.ones(2)])]
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with pytest.raises(TypeError, match="PackedSequence cannot be split over several replicas"):
            next(iter(strategy.experimental_distribute_dataset(batches)))
        own = strategy.distribute_datasets_from_function(lambda context: [batches[0], batches[0]])
        (both,) = own
        parts = strategy.experimental_local_results(both)
        assert [type(part) for part in parts] == [PackedSequence] * 2
        assert [part.data.device for part in parts] == [strategy.worker.torch_device(r) for r in (0, 1)]


class Failing:
    """Raises after two batches."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(2)
        yield torch.ones(2)
        raise OSError("the file ends here")


def test_batches_before_an_error_are_not_lost(one: td.Strategy) -> None:
    options = td.InputOptions(experimental_per_replica_buffer_size=3)
    iterator = iter(one.experimental_distribute_dataset(Failing(), options))
    assert [next(iterator).tolist() for _ in range(2)] == [[0.0, 0.0], [1.0, 1.0]]
    with pytest.raises(OSError, match="the file ends here"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_iterator_that_raised_needs_no_garbage_collector(one: td.Strategy) -> None:
    """With what was read ahead on a GPU it would be garbage of which a loader process dies."""
    iterator = iter(one.experimental_distribute_dataset(Failing()))
    kept = weakref.ref(iterator)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(OSError):
            for _ in range(3):
                next(iterator)
        del iterator
        assert kept() is None
    finally:
        gc.enable()


class Freed:
    """In a circle, so that only the garbage collector frees it."""

    there: list[int] = []  # noqa: RUF012  # in which processes one was freed

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        Freed.there.append(os.getpid())


class Collecting(Dataset[int]):
    """Says how many objects of another process were freed in the one that reads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return Freed.there.count(os.getpid())


@pytest.mark.parametrize("own", ["rebuilt", "stream"])
def test_loader_processes_leave_the_programs_garbage_alone(one: td.Strategy, own: str) -> None:
    """Of a GPU's events, which a fork cannot free."""
    loader = DataLoader(Collecting(), batch_size=2, num_workers=1)
    data: Any = loader if own == "rebuilt" else one.distribute_datasets_from_function(lambda context: loader)
    batches = one.experimental_distribute_dataset(loader) if own == "rebuilt" else data
    gc.collect()
    gc.disable()
    try:
        Freed()
        assert [batch.tolist() for batch in batches] == [[0, 0], [0, 0]]
        assert gc.get_freeze_count() == 0, "here it is collected as ever"
        Freed.there.clear()
        gc.collect()
        assert Freed.there == [os.getpid()]
    finally:
        gc.enable()
        Freed.there.clear()


def test_what_a_program_has_frozen_stays_frozen(one: td.Strategy) -> None:
    batches = one.experimental_distribute_dataset(DataLoader(Collecting(), batch_size=4, num_workers=1))
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert [batch.tolist() for batch in batches] == [[0] * 4]
        assert gc.get_freeze_count() <= frozen
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
