"""What may be distributed, what is refused and with which words, and what a rebuilt DataLoader keeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lockstep import make, parts_of, run_workers
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError, NotFoundError
from tfstyle_dist.input import AutoShardPolicy, FileDataset, read_tar
from tfstyle_dist.input.inline import MOST_BYTES, InlineCollate
from tfstyle_dist.input.loader import TensorRows
from tfstyle_dist.input.sampler import ShuffledOrder

TEN = TensorDataset(torch.arange(10.0))


@pytest.fixture
def two() -> Iterator[td.Strategy]:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


class Recorded(Dataset[tuple[int, str]]):
    """Remembers which samples were read."""

    def __init__(self, size: int) -> None:
        self.size, self.read = size, []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, str]:
        self.read.append(index)
        return index, f"text {index}"


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(5.0).unbind())


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "error", "words"),
    [
        (torch.arange(4.0), {}, TypeError, "TensorDataset"),
        ((torch.arange(4.0),), {}, TypeError, "TensorDataset"),
        ({"x": torch.arange(4.0)}, {}, TypeError, "TensorDataset"),
        (3, {}, TypeError, "not a dataset"),
        ([1, 2, 3], {}, TypeError, "list of int"),
        (iter([torch.arange(4.0)]), {}, TypeError, "only once"),
        (TEN, {}, ValueError, "not batched: pass global_batch_size"),
        (TEN, {"global_batch_size": 0}, ValueError, "at least 1"),
        (TEN, {"global_batch_size": 2.5}, TypeError, "whole number"),
        (TEN, {"global_batch_size": 1, "drop_remainder": True}, InvalidArgumentError, "smaller than the 2 replicas"),
        (DataLoader(TEN, batch_size=1, drop_last=True), {}, InvalidArgumentError, "smaller than the 2 replicas"),
        (NoLength(), {"global_batch_size": 2}, TypeError, "has no length"),
        (Stream(), {"global_batch_size": 2, "shuffle": True}, ValueError, "shuffle inside"),
        ([torch.arange(4.0)], {"shuffle": True}, ValueError, "need global_batch_size"),
        (DataLoader(TEN, batch_size=2), {"global_batch_size": 4}, ValueError, "has its own batch_size"),
        (
            DataLoader(TEN, batch_size=2, sampler=DistributedSampler(TEN, num_replicas=2, rank=0)),
            {},
            ValueError,
            "already sharded",
        ),
    ],
)
def test_bad_input_is_refused_at_once(two: td.Strategy, dataset: Any, options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        two.experimental_distribute_dataset(dataset, **options)


def test_a_generator_is_refused_with_what_works_instead(two: td.Strategy) -> None:
    def generated() -> Iterator[torch.Tensor]:
        yield from (torch.full((1,), float(i)) for i in range(4))

    class Again:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return generated()

    with pytest.raises(TypeError, match=r"A generator can be read only once.*def __iter__\(self\): return f\(\)"):
        two.distribute_datasets_from_function(lambda context: generated())
    dataset = two.distribute_datasets_from_function(lambda context: Again())
    epochs = [[two.experimental_local_results(batch) for batch in dataset] for _ in range(2)]
    assert epochs[0] == epochs[1]
    assert len(epochs[0]) == 2


def test_steps_without_an_end_repeat_the_distributed_dataset(two: td.Strategy) -> None:
    batches = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    for endless in (itertools.cycle(batches), itertools.chain.from_iterable(itertools.repeat(batches))):
        with pytest.raises(TypeError, match=r"no epochs.*itertools\.chain\.from_iterable\(itertools\.repeat\(batches"):
            two.experimental_distribute_dataset(endless)
    batches = two.experimental_distribute_dataset(batches)  # type: ignore[assignment]
    steps = iter(itertools.chain.from_iterable(itertools.repeat(batches)))
    assert [float(two.reduce("SUM", next(steps), axis=0)) for _ in range(5)] == [3.0, 7.0, 3.0, 7.0, 3.0]


@pytest.mark.parametrize(
    ("batches", "error", "words"),
    [
        ([torch.tensor(1.0)], IndexError, "not batched"),
        ([{"x": torch.ones(2), "n": 2}], IndexError, "Python value 2"),
        ([(torch.ones(2), torch.ones(3))], InvalidArgumentError, r"\[2, 3\]"),
        ([object()], TypeError, "object"),
    ],
)
def test_batches_that_cannot_be_split(two: td.Strategy, batches: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        next(iter(two.experimental_distribute_dataset(batches)))


def test_a_length_is_asked_for_where_there_is_none(two: td.Strategy) -> None:
    with pytest.raises(TypeError, match="not known in advance"):
        len(two.experimental_distribute_dataset(Stream(), global_batch_size=2))
    assert len(two.experimental_distribute_dataset(TEN, global_batch_size=4)) == 3


class OwnBatches:
    """A batch sampler of a program's own, as buckets of equal lengths are."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        yield from [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]][: self.passes + 1]


class CountedBatches(OwnBatches):
    def __len__(self) -> int:
        return self.passes + 2


def test_the_length_of_a_batch_sampler_of_ones_own(two: td.Strategy) -> None:
    rows = [torch.tensor([float(i)]) for i in range(10)]
    batches = two.experimental_distribute_dataset(DataLoader(rows, batch_sampler=CountedBatches()))
    for steps in (2, 3, 4):
        assert (len(batches), batches.cardinality, len(list(batches))) == (steps, steps, steps)
    assert len(two.experimental_distribute_dataset(DataLoader(rows, batch_sampler=[[0, 1], [2, 3, 4]]))) == 2
    assert len(two.experimental_distribute_dataset(DataLoader([torch.ones(4, 1)] * 3, batch_size=None))) == 3
    with pytest.raises(TypeError, match=r"what it reads has no length.*a batch sampler of your own needs __len__"):
        len(two.experimental_distribute_dataset(DataLoader(rows, batch_sampler=OwnBatches())))


def test_a_length_that_is_not_known_yet(two: td.Strategy) -> None:
    class Unready(OwnBatches):
        def __len__(self) -> int:
            raise RuntimeError("call set_epoch first")

    batches = two.experimental_distribute_dataset(DataLoader([torch.ones(1)] * 10, batch_sampler=Unready()))
    assert batches.cardinality < 0
    assert len([*iter(batches)]) == 2
    with pytest.raises(TypeError, match="what it reads has no length"):
        len(batches)


def test_workers_that_read_all_batches_know_how_many() -> None:
    def steps(worker: Any) -> tuple[int, int]:
        batches = make(worker, DataLoader(TEN, batch_sampler=CountedBatches()))
        return len(batches), len(list(batches))

    assert run_workers(2, 1, steps) == [(2, 2), (2, 2)]


@pytest.mark.parametrize("policy", [AutoShardPolicy.FILE, AutoShardPolicy.HINT])
def test_policies_that_a_dataset_cannot_follow(policy: AutoShardPolicy) -> None:
    with pytest.raises(NotFoundError, match="unshardable source dataset"):
        run_workers(2, 1, lambda worker: make(worker, Stream(), batch_size=2, policy=policy))


def test_fewer_files_than_workers(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"1 file\(s\) for 2 workers"):
        run_workers(2, 1, lambda worker: make(worker, FileDataset([tmp_path / "a"]), batch_size=2))


def test_hint_calls_the_datasets_own_method() -> None:
    class Sharded(Stream):
        def shard(self, num_shards: int, index: int) -> list[torch.Tensor]:
            return [torch.full((2,), float(index))] * 2

    def read(worker: Any) -> Any:
        return [parts_of(worker, b) for b in make(worker, Sharded(), policy=AutoShardPolicy.HINT)]

    assert run_workers(2, 1, read) == [[[[0.0]], [[0.0]]] * 2, [[[1.0]], [[1.0]]] * 2]


def test_each_sample_is_read_by_one_worker_only() -> None:
    def read(worker: Any) -> Any:
        dataset = Recorded(10)
        distributed = make(worker, DataLoader(dataset, batch_size=4))
        batches = list(distributed)
        return dataset.read, str(distributed.shard_report()), batches

    (zero, text, batches), (one, _, _) = run_workers(2, 1, read)
    assert (zero, one) == ([0, 1, 4, 5, 8], [2, 3, 6, 7, 9])
    assert "policy DATA (from AUTO), global batch 4" in text
    assert "worker 0: 5 samples per epoch" in text
    assert list(batches[0][1]) == ["text 0", "text 1"]


def test_texts_are_split_like_tensors(two: td.Strategy) -> None:
    batches = list(two.experimental_distribute_dataset(DataLoader(Recorded(5), batch_size=4)))
    number, text = batches[-1]
    assert [part.tolist() for part in number.values] == [[4], []]
    assert [list(part) for part in text.values] == [["text 4"], []]


def test_a_custom_batch_sampler_is_read_as_it_is() -> None:
    class Pairs(BatchSampler):
        """Batches of another order; not a plain BatchSampler."""

    def read(worker: Any) -> Any:
        loader = DataLoader(TEN, batch_sampler=Pairs(range(10), 4, False))
        distributed = make(worker, loader)
        return [parts_of(worker, b) for b in distributed], distributed.shard_report().notes

    (zero, notes), (one, _) = run_workers(2, 1, read)
    assert zero == [[[0.0, 1.0]], [[4.0, 5.0]], [[8.0]]]
    assert one == [[[2.0, 3.0]], [[6.0, 7.0]], [[9.0]]]
    assert "its batch sampler is a Pairs" in notes[0]


def _collate(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([number for number, _ in samples])


def _init(number: int) -> None:
    torch.manual_seed(number)


def test_a_rebuilt_loader_keeps_what_the_user_set(two: td.Strategy) -> None:
    loader = DataLoader(
        Recorded(6),
        batch_size=4,
        num_workers=1,
        collate_fn=_collate,
        worker_init_fn=_init,
        persistent_workers=True,
        prefetch_factor=3,
        timeout=30,
    )
    distributed = two.experimental_distribute_dataset(loader)
    for _ in range(2):
        assert [[p.tolist() for p in b.values] for b in distributed] == [[[0, 1], [2, 3]], [[4], [5]]]
    ours: Any = distributed.pipeline
    names = (
        "num_workers",
        "worker_init_fn",
        "persistent_workers",
        "prefetch_factor",
        "timeout",
        "pin_memory",
    )
    assert {n: getattr(ours._loader[0], n) for n in names} == {n: getattr(loader, n) for n in names}
    assert ours._loader[0].collate_fn.collate.collate is _collate
    first, second = iter(distributed), iter(distributed)  # persistent processes serve one iterator only
    taken = [next(first), next(second), next(first), next(second)]
    assert [b.values[0].tolist() for b in taken] == [[0, 1], [0, 1], [4], [4]]


def _all_kinds(samples: list[Any]) -> dict[str, Any]:
    rows = len(samples)
    return {
        "floats": torch.arange(rows * 3.0).view(rows, 3),
        "halves": torch.arange(rows * 1.0).to(torch.bfloat16),
        "complex": torch.arange(rows * 1.0).to(torch.complex64).conj(),
        "flags": torch.tensor([True] * rows),
        "columns": torch.arange(rows * 2).view(2, rows).T,
        "empty": torch.empty(rows, 0),
        "large": torch.ones(rows, MOST_BYTES),
        "text": [str(i) for i in range(rows)],
        "array": np.arange(rows),
    }


def test_batches_of_loader_processes_are_what_the_collate_function_made() -> None:
    with td.OneDeviceStrategy("cpu") as strategy:
        loader = DataLoader(Recorded(3), batch_size=3, num_workers=1, collate_fn=_all_kinds)
        (found,) = strategy.experimental_distribute_dataset(loader)
    expected = _all_kinds([0, 1, 2])
    assert list(found) == list(expected)
    for name in ("floats", "halves", "complex", "flags", "columns", "empty", "large"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
        found[name].add_(1) if name != "flags" else found[name].logical_not_()  # it is the receiver's own memory
    assert found["text"] == expected["text"]
    assert np.array_equal(found["array"], expected["array"])


def small_and_large(_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(MOST_BYTES, dtype=torch.uint8), torch.ones(MOST_BYTES + 1, dtype=torch.uint8)


def test_small_tensors_travel_in_the_message_and_large_ones_in_shared_memory() -> None:
    found = DataLoader(Recorded(1), num_workers=1, collate_fn=InlineCollate(small_and_large))
    ((first, second),) = list(found)
    assert (first.is_shared(), second.is_shared()) == (False, True)


def test_whole_shares_of_a_tensor_dataset_look_as_collated() -> None:
    data = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    rows = TensorRows(data)
    expected = torch.utils.data.default_collate([data[i] for i in (4, 1)])
    found = rows.__getitems__([4, 1])
    assert type(found) is type(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_files_are_read_once_by_a_loaders_processes(two: td.Strategy, tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(f"{name}1\n{name}2\n")
    dataset = FileDataset([tmp_path / n for n in "abc"])
    batches = two.experimental_distribute_dataset(dataset, global_batch_size=2, num_workers=2)
    texts = [t for batch in batches for part in two.experimental_local_results(batch) for t in part]
    assert sorted(texts) == ["a1", "a2", "b1", "b2", "c1", "c2"]


def test_tar_shards(tmp_path: Path) -> None:
    import io
    import tarfile

    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for name in ("one.txt", "one.cls", "two.txt", "two.cls"):
            info = tarfile.TarInfo(name)
            info.size = len(name)
            archive.addfile(info, io.BytesIO(name.encode()))
    samples = list(read_tar(str(tmp_path / "0.tar")))
    assert [s["__key__"] for s in samples] == ["one", "two"]
    assert samples[1]["cls"] == b"two.cls"


def test_element_spec(two: td.Strategy) -> None:
    data = TensorDataset(torch.zeros(6, 3), torch.arange(6))
    x, y = two.experimental_distribute_dataset(data, global_batch_size=4).element_spec
    assert x.values[0].shape == (None, 3)
    assert y.values[1].dtype is torch.int64


def test_arrays_keep_their_kind_when_empty(two: td.Strategy) -> None:
    (batch,) = two.experimental_distribute_dataset([{"a": np.ones((1, 2), dtype=np.float16), "t": np.array(["x"])}])
    assert batch["a"].values[1].shape == (0, 2)
    assert batch["a"].values[1].dtype == np.float16
    assert batch["t"].values[1].shape == (0,)


def test_dataset_functions(two: td.Strategy) -> None:
    with pytest.raises(TypeError, match="must be a function"):
        two.distribute_datasets_from_function(TEN)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unbatched TensorDataset"):
        two.distribute_datasets_from_function(lambda context: TEN)
    batches = two.distribute_datasets_from_function(lambda context: DataLoader(TEN, batch_size=3))
    got = [[part[0].tolist() for part in two.experimental_local_results(b)] for b in batches]
    assert got == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [[6.0, 7.0, 8.0], [9.0]]]
    assert len(batches) == 2


def test_reduce_folds_an_epoch(two: td.Strategy) -> None:
    batches = two.experimental_distribute_dataset([torch.ones(3), torch.ones(2)])
    total = batches.reduce(0.0, lambda state, batch: state + float(two.reduce("SUM", batch, axis=0)))
    assert total == 5.0


@pytest.mark.parametrize("policy", [AutoShardPolicy.FILE, AutoShardPolicy.HINT, AutoShardPolicy.OFF])
def test_one_worker_has_nothing_to_divide(two: td.Strategy, policy: AutoShardPolicy) -> None:
    for dataset, options in ((DataLoader(TEN, batch_size=4), {}), (TEN, {"global_batch_size": 4})):
        batches = two.experimental_distribute_dataset(dataset, auto_shard_policy=policy, **options)
        (last,) = list(batches)[-1]
        assert [part.tolist() for part in last.values] == [[8.0, 9.0], []], "cut by the full batch's size, as recorded"


def test_what_is_read_does_not_go_to_the_default_device() -> None:
    """On a device of no memory nothing could be read; on a GPU a CPU generator would be refused."""
    with torch.device("meta"):
        order = ShuffledOrder(range(8), seed=1).indices(0)
        assert sorted(order.tolist()) == list(range(8))
        (rows,) = TensorRows(TensorDataset(torch.arange(8.0, device="cpu"))).__getitems__(order[:2].tolist())
    assert rows.tolist() == [float(i) for i in order[:2]]
