"""What is not a tensor in a batch, batches that are read ahead of an error, and garbage beside loader processes."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset

import tfstyle_dist as td
from tfstyle_dist.input.forks import leave_garbage_to_the_parent
from tfstyle_dist.input.prefetch import DevicePrefetcher
from tfstyle_dist.input.split import leaves_of, map_leaves

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def one() -> Iterator[td.Strategy]:
    with td.OneDeviceStrategy("cpu") as strategy:
        yield strategy


@pytest.fixture(autouse=True)
def _nothing_is_frozen() -> None:
    gc.unfreeze()  # what ``conftest.py`` has frozen


def place_of(strategy: td.Strategy) -> torch.device:
    return strategy.worker.torch_device(0)


class Stored(MutableMapping[str, Any]):
    """Keeps its entries in an object that a shallow copy would share."""

    def __init__(self, entries: Any = ()) -> None:
        self._entries = dict(entries)

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Dotted(dict):  # type: ignore[type-arg]
    """Shows its entries as attributes, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


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


class Quantity:
    """Its method ``to`` is about something else."""

    def to(self, unit: str) -> Quantity:
        raise ValueError(f"unknown unit {unit}")


@pytest.mark.parametrize("kind", [Stored, Dotted])
def test_shares_of_a_mapping_are_its_own(kind: Any) -> None:
    whole = torch.arange(4.0)
    batches = [kind({"x": whole})]
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        (step,) = strategy.experimental_distribute_dataset(batches)
        shares = strategy.experimental_local_results(step)
        assert [type(share) for share in shares] == [kind] * 2
        assert [share["x"].tolist() for share in shares] == [[0.0, 1.0], [2.0, 3.0]]
        assert [share["x"].device for share in shares] == [strategy.worker.torch_device(r) for r in (0, 1)]
        if kind is Dotted:
            assert [share.x.tolist() for share in shares] == [[0.0, 1.0], [2.0, 3.0]]
    assert batches[0]["x"] is whole, "what the program has stays as it is"


class Named(dict):  # type: ignore[type-arg]
    """Takes its entries one by one: a dict would be the first of them."""

    def __init__(self, x: Any, labels: Any = None) -> None:
        super().__init__(x=x, labels=labels)


def test_a_mapping_that_is_not_made_from_a_dict_becomes_one() -> None:
    assert map_leaves(lambda leaf: leaf.tolist(), Named(torch.ones(1))) == {"x": [1.0], "labels": None}
    given = [Fixed(x=torch.ones(3))]
    assert map_leaves(lambda leaf: leaf.tolist(), given) == [{"x": [1.0, 1.0, 1.0]}]
    assert [leaf.tolist() for leaf in leaves_of(given)] == [[1.0, 1.0, 1.0]]


def test_objects_and_packed_sequences_come_to_the_device(one: td.Strategy) -> None:
    packed, held, quantity = pack_sequence([torch.ones(3), torch.ones(2)]), Holder(torch.ones(2)), Quantity()
    given = {"graph": Graph(torch.ones(2)), "held": held, "packed": packed, "names": ["a", "b"], "meter": quantity}
    (batch,) = one.experimental_distribute_dataset([{**given, "kind": torch.nn.Linear}])
    assert batch["graph"].nodes.device == batch["held"].nodes.device == place_of(one)
    assert held.nodes.device.type == "cpu", "the one of the program stays where it is"
    assert isinstance(batch["packed"], PackedSequence)
    assert batch["packed"].data.device == place_of(one)
    assert batch["packed"].batch_sizes.device.type == "cpu", "as torch wants it"
    assert (batch["names"], batch["meter"], batch["kind"]) == (["a", "b"], quantity, torch.nn.Linear)


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


@pytest.mark.parametrize("ahead", [1, 3])
def test_what_is_on_the_device_already_may_be_filled_again_for_the_next_batch(one: td.Strategy, ahead: int) -> None:
    """For where the suite runs on devices (``on_devices.py``): for a CPU nothing is read ahead, nor can this fail."""

    class Refilled:
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield torch.full((2,), 5.0, device="cpu")
            memory = torch.empty(2, device=place_of(one))
            for number in range(4):
                yield memory.fill_(number)

    options = td.InputOptions(experimental_per_replica_buffer_size=ahead)
    read = [float(batch.sum()) for batch in one.experimental_distribute_dataset(Refilled(), options)]
    assert read == [10.0, 0.0, 2.0, 4.0, 6.0]


def test_batches_before_an_error_are_not_lost(one: td.Strategy) -> None:
    options = td.InputOptions(experimental_per_replica_buffer_size=3)
    iterator = iter(one.experimental_distribute_dataset(Failing(), options))
    assert [next(iterator).tolist() for _ in range(2)] == [[0.0, 0.0], [1.0, 1.0]]
    with pytest.raises(OSError, match="the file ends here"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("reads", [1, 3])
def test_an_iterator_that_raised_needs_no_garbage_collector(one: td.Strategy, reads: int) -> None:
    """With what was read ahead on a GPU it would be garbage of which a loader process dies."""
    options = td.InputOptions(experimental_per_replica_buffer_size=2)
    iterator = iter(one.experimental_distribute_dataset(Failing(), options))
    kept = [weakref.ref(iterator)]
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(OSError):
            for _ in range(reads):
                next(iterator)
        if isinstance(iterator._steps, DevicePrefetcher):
            kept.append(weakref.ref(iterator._steps))
        del iterator
        assert [reference() for reference in kept] == [None] * len(kept)
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


class Nested:
    """A source of batches whose loader processes are forked at the first batch."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from DataLoader(Collecting(), batch_size=2, num_workers=1)


@pytest.mark.parametrize("has_frozen", [False, True])
@pytest.mark.parametrize(
    "source", [DataLoader(Collecting(), batch_size=2, num_workers=1), Nested()], ids=["own", "not"]
)
def test_loader_processes_leave_the_programs_garbage_alone(one: td.Strategy, source: Any, has_frozen: bool) -> None:
    """Of a GPU's events, which a fork cannot free; this is begun where batches are moved to a device."""
    leave_garbage_to_the_parent()
    gc.collect()
    gc.disable()
    if has_frozen:
        gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        Freed()
        assert [batch.tolist() for batch in one.experimental_distribute_dataset(source)] == [[0, 0], [0, 0]]
        assert gc.get_freeze_count() <= frozen
        assert not gc.isenabled(), "as the program wants it"
        gc.enable()
        Freed.there.clear()
        gc.collect()
        assert Freed.there == [os.getpid()], "here it is collected as ever"
        list(one.experimental_distribute_dataset(source))
        assert gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable()
        Freed.there.clear()


def test_several_threads_fork_at_once() -> None:
    leave_garbage_to_the_parent()
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(lambda _: _forked_collects(), range(40)))
    assert ended == [0] * 40
    assert gc.isenabled()


def _forked_collects() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if gc.get_freeze_count() > 0 else 1)
    return os.waitpid(pid, 0)[1]
