"""Loaders that are rebuilt or read as they are: subclasses, order, random numbers, mappings and exceptions."""

from __future__ import annotations

import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from lockstep import make, run_workers
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import tfstyle_dist as td
from tfstyle_dist.input import AutoShardPolicy
from tfstyle_dist.input.loader import SamplerPipeline
from tfstyle_dist.input.sampler import EpochOrder, SampledOrder, SequentialOrder
from tfstyle_dist.input.seeds import LoaderSeeds, WithSeeds
from tfstyle_dist.input.sharding import Layout

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def one() -> Iterator[td.Strategy]:
    with td.OneDeviceStrategy("cpu") as strategy:
        yield strategy


class Slow(Dataset[int]):
    """The first loader process is slower than the second one."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> int:
        if index == 0:
            time.sleep(1.0)
        return index


def test_batches_come_in_order_although_a_loader_does_not_ask_for_it(one: td.Strategy) -> None:
    loader = DataLoader(Slow(), batch_size=4, num_workers=2, in_order=False)
    iterator = iter(one.experimental_distribute_dataset(loader))
    assert next(iterator).tolist() == [0, 1, 2, 3], "a saved position counts the samples before it"
    options = {"global_batch_size": 4, "num_workers": 2, "in_order": False}
    assert next(iter(one.experimental_distribute_dataset(Slow(), **options))).tolist() == [0, 1, 2, 3]


class Finishing(DataLoader[Any]):
    """Finishes its batches in the iterator, as loaders of graphs do."""

    def _get_iterator(self) -> Any:
        return ({"x": batch, "feature": batch * 10} for batch in super()._get_iterator())


class Renamed(DataLoader[Any]):
    """A subclass that only takes other arguments."""

    def __init__(self, dataset: Any, size: int) -> None:
        super().__init__(dataset, batch_size=size)

    def __len__(self) -> int:
        return super().__len__()


def test_a_loader_that_finishes_its_batches_is_read_as_it_is(one: td.Strategy) -> None:
    loader = Finishing(list(range(6)), batch_size=4)
    batches = one.experimental_distribute_dataset(loader)
    assert [batch["feature"].tolist() for batch in batches] == [[0, 10, 20, 30], [40, 50]]
    rebuilt = one.experimental_distribute_dataset(Renamed(list(range(6)), 4))
    assert isinstance(rebuilt.pipeline, SamplerPipeline)


class Sharded(Dataset[int]):
    """A dataset with indices that lists files and has a method ``shard``, as those of Hugging Face do."""

    files = ("a", "b")

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        return index

    def shard(self, num_shards: int, index: int) -> list[int]:
        return list(range(index, 16, num_shards))

    def with_files(self, files: Any) -> Any:
        return self


@pytest.mark.parametrize("policy", [AutoShardPolicy.FILE, AutoShardPolicy.HINT])
@pytest.mark.parametrize("options", [{"batch_size": 4, "shuffle": True}, {"batch_sampler": [[0, 1], [2, 3]]}])
def test_a_loader_over_indices_is_not_dealt_out_as_a_stream(policy: AutoShardPolicy, options: Any) -> None:
    loader = DataLoader(Sharded(), **options)
    with pytest.raises(ValueError, match=rf"AutoShardPolicy.{policy.name} deals out streams, but Sharded has indices"):
        run_workers(2, 1, lambda worker: make(worker, loader, policy=policy))


class Words(dict):  # type: ignore[type-arg]
    """A mapping with something of its own, as a tokenizer's."""

    def __init__(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__(x=x, labels=labels)
        self.count = len(x)


Pair = namedtuple("Pair", "x y")


def _words(samples: list[int]) -> Any:
    x = torch.tensor(samples)
    return {"words": Words(x, x), "pair": Pair(x, [x]), "ordered": OrderedDict(x=x)}


def test_what_a_loader_process_collates_arrives_whole(one: td.Strategy) -> None:
    loader = DataLoader(list(range(4)), batch_size=4, num_workers=1, collate_fn=_words)
    (batch,) = one.experimental_distribute_dataset(loader)
    words, pair = batch["words"], batch["pair"]
    assert words["x"].tolist() == [0, 1, 2, 3]
    if one.worker.torch_device(0).type == "cpu":  # it is moved as a dict, for its class cannot be made from one
        assert (type(words), words.count) == (Words, 4)
    assert (type(pair), pair.x.tolist(), pair.y[0].tolist()) == (Pair, [0, 1, 2, 3], [0, 1, 2, 3])
    assert batch["ordered"]["x"].tolist() == [0, 1, 2, 3]


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def drawn(rank: int, order: EpochOrder) -> list[list[float]]:
    """What the loader processes of one of two workers draw in two epochs, and then the program itself."""
    torch.manual_seed(0)
    layout, policy = Layout(workers=2, worker=rank), AutoShardPolicy.DATA
    pipeline = SamplerPipeline(Augmented(), order, 4, False, layout, policy, {"num_workers": 1})
    epochs = [[x for step in pipeline.begin(epoch, (0, 0)) for x in step.parts[0].tolist()] for epoch in range(2)]
    return [*epochs, [float(torch.rand(()))]]


class _Alone:
    """Stands for a worker whose order is not sent to others."""

    class group:
        rank, size, alone = 0, 1, True


@pytest.mark.parametrize("own_sampler", [False, True])
def test_loader_processes_of_several_workers_draw_other_random_numbers(own_sampler: bool) -> None:
    sampler = WeightedRandomSampler([1.0] * 8, 8)
    order: EpochOrder = SampledOrder(sampler, 1, _Alone) if own_sampler else SequentialOrder(range(8))  # type: ignore[arg-type]
    *zero, after = drawn(0, order)
    *one, after_one = drawn(1, order)
    numbers = [x for epoch in zero + one for x in epoch]
    assert len(set(numbers)) == len(numbers) == 16
    torch.manual_seed(0)
    for _ in range(2):
        iter(DataLoader(Augmented(), num_workers=0))
    assert after == after_one == [float(torch.rand(()))], "the program's own numbers are those beside a DataLoader"
    assert drawn(1, order)[0] == one[0], "the same seed, the same numbers"


class AugmentedFiles(IterableDataset[torch.Tensor]):
    """Can be divided by files, and by itself."""

    def __init__(self, files: Sequence[str] = ("a", "b")) -> None:
        self.files = files

    def with_files(self, files: Sequence[str]) -> AugmentedFiles:
        return AugmentedFiles(files)

    def shard(self, count: int, index: int) -> AugmentedFiles:
        return AugmentedFiles(self.files[index::count])

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in self.files:
            yield torch.rand(4)


def read_files(policy: AutoShardPolicy, given: bool = True) -> list[list[float]]:
    """What each of two workers reads in two passes, with the same generator of its own."""

    def read(worker: Any) -> list[float]:
        generator = torch.Generator().manual_seed(3) if given else None
        numbers = []
        for _ in range(2):  # distributed anew for each, as some loops do it
            loader = DataLoader(AugmentedFiles(), batch_size=1, num_workers=1, generator=generator)
            batches = make(worker, loader, policy=policy)
            numbers += [x for batch in batches for x in batch.flatten().tolist()]
        return numbers

    return run_workers(2, 1, read)


def test_loader_processes_of_workers_with_own_files_draw_other_random_numbers() -> None:
    numbers = read_files(AutoShardPolicy.FILE)
    assert [len(set(own)) for own in numbers] == [8, 8]
    assert len({*numbers[0], *numbers[1]}) == 16
    assert read_files(AutoShardPolicy.FILE) == numbers, "the same seed, the same numbers"


def test_loader_processes_that_shard_by_themselves_draw_the_same() -> None:
    """They may take every other entry of an order that each of them draws."""
    first, second = read_files(AutoShardPolicy.HINT)
    assert first == second
    assert len(set(first)) == 8


def test_files_are_read_where_tensors_are_made_on_another_device_by_default(one: td.Strategy) -> None:
    place = "meta" if one.worker.torch_device(0).type == "cpu" else str(one.worker.torch_device(0))
    with torch.device(place):
        seeds = LoaderSeeds(None, 1)
        loader = DataLoader(range(4), batch_size=2, generator=seeds.generator)
        assert [len(batch) for batch in WithSeeds(loader, seeds)] == [2, 2]


def test_an_epoch_inside_of_an_epoch_has_seeds_of_its_own() -> None:
    """The processes are busy with the outer one: others read the inner one."""

    def numbers(nested: bool) -> list[float]:
        torch.manual_seed(0)
        options = {"num_workers": 1, "persistent_workers": True}
        layout = Layout(workers=2, worker=1)
        pipeline = SamplerPipeline(
            Augmented(), SequentialOrder(range(8)), 4, False, layout, AutoShardPolicy.DATA, options
        )
        outer = pipeline.begin(0, (0, 0))
        next(outer)
        if nested:
            list(pipeline.begin(1, (0, 0)))
        list(outer)
        torch.manual_seed(7)
        return [x for step in pipeline.begin(2, (0, 0)) for x in step.parts[0].tolist()]

    assert numbers(True) == numbers(False)


class Bad(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise KeyError("no sample five")
        return index


def test_an_exception_of_the_dataset_is_no_silent_end_of_the_epoch(
    one: td.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    batches = one.experimental_distribute_dataset(DataLoader(Bad(), batch_size=4))
    iterator = iter(batches)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        next(iterator)
    state = iterator.state_dict()
    assert not state["ended"]
    for _ in range(2):  # a program that has caught it is told, and does not turn for ever
        with pytest.raises(StopIteration):
            next(iterator)
    assert [r.getMessage() for r in caplog.records if "the epoch ends early, because KeyError" in r.getMessage()] != []
    state["position"] = [8, 0]  # what stands before the failure may be left out
    iterator.load_state_dict(state)
    assert [batch.tolist() for batch in iterator] == [[8, 9, 10, 11]]


def test_processes_draw_for_the_epochs_after_a_restored_one_what_they_would_have_drawn() -> None:
    """A new program's processes began with the numbers of the first epoch again."""
    passes, state = [], None
    for undisturbed in (True, False):
        torch.manual_seed(1)
        with td.OneDeviceStrategy("cpu:0") as strategy:
            loader = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1)
            dataset = strategy.experimental_distribute_dataset(loader)
            for number in range(3):
                batches = iter(dataset)
                if not undisturbed and number == 0:
                    assert state is not None
                    batches.load_state_dict(state)
                    list(batches)  # the rest of the second epoch
                    passes.append(list(dataset))
                    break
                passes.append([next(batches)])
                state = batches.state_dict() if undisturbed and number == 1 else state
                passes[-1] += list(batches)
    assert torch.equal(torch.cat(passes[3]), torch.cat(passes[2]))
