"""What a collate function may return besides tensors of examples: lists of samples, objects, other numbers."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from lockstep import make, run_workers
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import tfstyle_dist as td
from tfstyle_dist.core import logging as core_logging
from tfstyle_dist.values import has_unequal_shares, share_of_arguments

pytestmark = pytest.mark.timeout(60)
IMAGES = [torch.full((4, 2, 2), float(i)) for i in range(8)]


class Images(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(IMAGES)


@pytest.mark.parametrize(
    "options",
    [{"dataset": IMAGES, "batch_sampler": [[0, 1, 2], [3, 4, 5]]}, {"dataset": Images(), "batch_size": 3}],
    ids=["own batch sampler", "stream"],
)
@pytest.mark.parametrize("collate", [list, tuple, lambda images: {"images": list(images), "x": images[0]}])
def test_a_list_of_images_is_not_cut_by_their_channels(options: Any, collate: Any) -> None:
    loader = DataLoader(collate_fn=collate, **options)
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        iterator = iter(strategy.experimental_distribute_dataset(loader))
        with pytest.raises(ValueError, match=r"a (list|tuple) with an entry for each of") as caught:
            next(iterator)
    assert "strategy.distribute_datasets_from_function(lambda context: DataLoader" in str(caught.value)


def test_a_list_of_images_is_refused_also_where_the_first_batch_is_smaller() -> None:
    batches = [[0, 1, 2], [3, 4, 5, 6]]

    class Batches(BatchSampler):
        def __iter__(self) -> Any:
            return iter(batches)

    data = [torch.zeros(3, 8, 8)] * 7
    sampler = Batches(SequentialSampler(data), 4, drop_last=False)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    refused = pytest.raises(ValueError, match="a list with an entry for each of 4 samples")
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, refused:
        list(strategy.experimental_distribute_dataset(loader))


class OneLeft(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Ends with a batch of one sample, where batches have two."""

    def __iter__(self) -> Any:
        return iter([(torch.full((3,), float(i)), torch.tensor(i)) for i in range(5)])


def both(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def two_views(samples: list[Any]) -> Any:
    x, _ = both(samples)
    return x.repeat(2, 1), -x.repeat(2, 1)


def several_for_each(samples: list[Any]) -> Any:
    x, y = both(samples)
    return x.repeat(2, 1), y.repeat(2)


@pytest.mark.parametrize(
    ("collate", "sizes"),
    [
        (None, [[1, 1], [1, 1], [1, 0]]),
        (both, [[1, 1], [1, 1], [1, 0]]),
        (several_for_each, [[2, 2], [2, 2], [1, 1]]),
        (two_views, [[2, 2], [2, 2], [1, 1]]),
    ],
    ids=["torch's own", "a tuple", "several examples for each sample", "two views"],
)
def test_as_many_fields_as_samples_are_cut_where_the_last_batch_is_smaller(collate: Any, sizes: Any) -> None:
    loader = DataLoader(OneLeft(), batch_size=2, collate_fn=collate)
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        found = [[len(part) for part in y.values] for _, y in strategy.experimental_distribute_dataset(loader)]
    assert found == sizes


def test_lists_of_fields_are_cut() -> None:
    """Two fields and batches of two samples: only a batch of one sample tells them from a list of samples."""
    data = [(torch.full((3,), float(i)), torch.tensor(i)) for i in range(4)]

    def fields(samples: list[Any]) -> list[torch.Tensor]:
        return [torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])]

    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        torch.manual_seed(1)
        for _, y in strategy.experimental_distribute_dataset(DataLoader(data, batch_size=2, collate_fn=fields)):
            assert [len(part) for part in y.values] == [1, 1]


def test_a_collate_function_that_takes_pairs_alone() -> None:
    """It cannot be asked for a batch of one sample."""

    def pairs(samples: list[int]) -> list[torch.Tensor]:
        assert len(samples) % 2 == 0, "needs pairs"
        return [torch.tensor(samples), -torch.tensor(samples)]

    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        loader = DataLoader(range(4), batch_size=2, collate_fn=pairs)  # type: ignore[arg-type]
        found = [[x.tolist() for x in batch[0].values] for batch in strategy.experimental_distribute_dataset(loader)]
    assert found == [[[0], [1]], [[2], [3]]]


def _detection(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def test_an_empty_share_of_lists_is_lists_of_nothing() -> None:
    """The second worker has no example in the last batch; gray images have one channel, so that is no help."""
    gray = [torch.zeros(1, 5 + i, 5) for i in range(5)]
    pairs = [(image, {"boxes": torch.zeros(i, 4), "name": "a"}) for i, image in enumerate(gray)]

    def read(worker: Any) -> Any:
        lists = list(make(worker, DataLoader(gray, batch_size=4, collate_fn=list)))
        tuples = list(make(worker, DataLoader(pairs, batch_size=4, collate_fn=_detection)))
        mixed = list(
            make(worker, DataLoader(gray, batch_size=4, collate_fn=lambda s: {"i": s, "n": torch.ones(len(s))}))
        )
        return lists[-1], tuples[-1], mixed[-1]

    _, (images, pair, mixed) = run_workers(2, 1, read)
    assert images == []
    assert pair == ([], []), "of which, unlike of an empty tuple, the share can be noted"
    assert (mixed["i"], len(mixed["n"])) == ([], 0)


def test_an_empty_share_is_the_programs_own() -> None:
    """What a program takes out of an empty batch is there again in the next one."""
    data = [{"x": torch.full((2,), float(i)), "labels": torch.tensor(i)} for i in range(5)]

    def read(worker: Any) -> Any:
        found = []
        for dataset in (make(worker, DataLoader(data, batch_size=4)), make(worker, Pairs(1 + worker.group.rank % 2))):
            for _ in range(2):
                for batch in dataset:
                    found.append(tuple(batch.pop("labels").shape))
                    batch["x"].requires_grad_()
                    batch["more"] = 1
        return found

    zero, one = run_workers(2, 1, read)
    assert zero[:4] == [(2,), (1,)] * 2
    assert one[:4] == [(2,), (0,)] * 2


class Pairs:
    """An iterable of batches; only its first worker may have them all."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        return iter([{"x": torch.zeros(n, 2), "labels": torch.zeros(n)} for n in (4, 1)])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is logged; nothing counts as having been said before."""
    monkeypatch.setattr(core_logging, "_said", set())
    caplog.set_level(logging.WARNING)
    return caplog


def shares(data: Any, collate: Any, size: int = 4) -> Any:
    """The examples by which each of two workers is weighed, batch by batch."""

    def read(worker: Any) -> Any:
        found = []
        for batch in make(worker, DataLoader(data, batch_size=size, collate_fn=collate)):
            share = share_of_arguments([batch])
            found.append((share and share.examples, has_unequal_shares([batch])))
        return found

    return run_workers(2, 1, read)


def test_the_share_of_an_object_is_known() -> None:
    data = list(torch.arange(7.0))
    expected = [[(None, False), (2, True)], [(None, False), (1, True)]]
    assert shares(data, lambda samples: Batch(torch.stack(samples))) == expected


def test_an_object_that_cannot_be_noted_is_told(told: pytest.LogCaptureFixture) -> None:
    data = list(torch.arange(7.0))
    assert shares(data, lambda samples: Slotted(torch.stack(samples)))[0][1] == (None, False)
    assert "No share can be noted of a Slotted" in told.text


def test_another_number_of_examples_than_samples_is_told(told: pytest.LogCaptureFixture) -> None:
    data = list(torch.arange(8.0))
    shares(data, lambda samples: torch.stack(samples).repeat(3))
    assert "examples for" not in told.text, "several examples of each sample weigh alike"
    shares(data, lambda samples: torch.stack([x for x in samples if x != 1]))
    assert "collate_fn returned 1 examples for 2 samples" in told.text


def test_fields_of_too_few_examples_are_told_and_lists_of_samples_are_not(told: pytest.LogCaptureFixture) -> None:
    """Two fields of two samples."""
    shares([torch.zeros(5) for _ in range(8)], list)
    assert "examples for" not in told.text
    shares(list(torch.arange(8.0)), lambda samples: [torch.stack([x for x in samples if x != 1])] * 2)
    assert "collate_fn returned 1 examples for 2 samples" in told.text


def test_a_batch_that_cannot_be_empty_is_refused_before_the_first_step() -> None:
    """The second worker has no example of the fifth sample."""
    steps: list[int] = []

    def read(worker: Any) -> None:
        for _ in make(worker, DataLoader(list(torch.arange(5.0)), batch_size=4, collate_fn=Batch)):
            steps.append(worker.group.rank)

    with pytest.raises(TypeError, match=r"a Batch cannot be split.*distribute_datasets_from_function") as caught:
        run_workers(2, 1, read)
    assert 1 not in steps
    assert "drop_last=True" in caught.value.__notes__[0]
