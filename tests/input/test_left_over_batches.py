"""Batches of ``dataset_fn`` that some replicas or workers have and others have not, and batches that differ."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lockstep import run_workers
from torch.utils.data import IterableDataset

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.input import distribute_from_function
from tfstyle_dist.input.split import describe, from_description
from tfstyle_dist.runtime.worker import Worker

pytestmark = pytest.mark.timeout(60)
two_ranks = pytest.mark.distributed(workers=2, timeout=60, deadline=20)
Sample = namedtuple("Sample", "image label")
X = torch.ones(2)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([X])


def steps_of_workers(batches: Callable[[int], list[Any]]) -> list[list[Any]]:
    """The steps of two workers of one replica, of which each has batches of its own."""

    def steps(worker: Worker) -> list[Any]:
        return list(distribute_from_function(lambda context: batches(context.input_pipeline_id), worker, None))

    return run_workers(2, 1, steps)


def test_a_worker_without_batches_is_told_of_none_and_of_names() -> None:
    batch = Sample(X, {"mask": None, (1, 2): X.bool()})
    (has,), (told,) = steps_of_workers(lambda worker: [] if worker else [batch])
    assert has is batch
    assert (len(told.image), told.label["mask"], told.label[1, 2].dtype) == (0, None, torch.bool)


def test_scalars_that_are_left_over_are_dropped_by_all_workers() -> None:
    seen = steps_of_workers(lambda worker: list(torch.arange(2.0 + worker)))
    assert seen == [[0.0, 1.0], [0.0, 1.0]]


def test_a_description_comes_back_from_json() -> None:
    told = from_description(describe(Sample(X, {"mask": None})))
    assert (type(told).__name__, told._fields, told.label) == ("Sample", ("image", "label"), {"mask": None})
    renamed = namedtuple("renamed", "x class", rename=True)
    assert from_description(describe(renamed(X, None)))._fields == ("x", "_1")
    assert list(from_description(["dict", [[[1, 2], ["none"]]]])) == [(1, 2)]


@two_ranks
def test_ranks_end_together_with_what_is_left_over(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        with_none = [{"x": X, "mask": None}] * (2 - rank)
        seen = list(strategy.distribute_datasets_from_function(lambda _: with_none))
        assert [len(batch["x"]) for batch in seen] == [2, 2 - 2 * rank]
        none_at_all = [] if rank else [(X, None)]
        (only,) = strategy.distribute_datasets_from_function(lambda _: none_at_all)
        assert (len(only[0]), only[1]) == (2 - 2 * rank, None)
        scalars = strategy.distribute_datasets_from_function(lambda _: list(torch.arange(2.0 + rank)))
        assert [float(scalar) for scalar in scalars] == [0.0, 1.0]
        sizes = strategy.worker.group.gather_objects(rank, "both go on")
        assert sizes == [0, 1]


@two_ranks
def test_objects_that_are_left_over_are_an_error_on_all_ranks(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        iterator = iter(strategy.distribute_datasets_from_function(lambda _: [object()] * (1 + rank)))
        next(iterator)
        with pytest.raises(InvalidArgumentError, match="another one has a object, of which no empty one can be made"):
            next(iterator)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ((X,), {"a": X}, "replica 0 got a tuple of 1, replica 1 got a dict with the keys"),
        ({"b": X}, {"a": X}, r"with the keys \['b'\], replica 1 got a dict with the keys \['a'\]"),
        ({"b": X}, {"b": X, "a": X}, r"replica 1 got a dict with the keys \['b', 'a'\]"),
        ([X, X], [X], "replica 0 got a list of 2, replica 1 got a list of 1.*drop_last=True"),
        (X, (X, X), "replica 0 got a Tensor, replica 1 got a tuple of 2"),
        ((X, (X,)), (X, None), "replica 0 got a tuple of 1, replica 1 got a NoneType"),
    ],
)
def test_batches_of_one_step_have_one_structure(first: Any, second: Any, says: str) -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        batches = strategy.distribute_datasets_from_function(lambda _: [first, second])
        with pytest.raises(InvalidArgumentError, match=says):
            next(iter(batches))


def test_leaves_of_one_step_may_be_none_for_a_replica() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        batches = strategy.distribute_datasets_from_function(lambda _: [(X, None), (X, ["a", "b"])])
        (step,) = batches
        assert strategy.experimental_local_results(step[1]) == (None, ["a", "b"])
        assert strategy.run(lambda x, label: label is None, args=step).values == (True, False)


def test_an_object_that_a_replica_lacks_is_explained() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        batches = strategy.distribute_datasets_from_function(lambda _: [object()])
        with pytest.raises(TypeError, match="A batch with a object cannot be split") as caught:
            next(iter(batches))
    assert "no multiple of the replicas: 1 of them would get an empty batch" in caught.value.__notes__[0]


@pytest.mark.parametrize("make", [OrderedDict, lambda entries: defaultdict(int, entries), dict])
def test_ordered_and_default_dicts_are_nests(make: Callable[[Any], Any]) -> None:
    given = make({"b": torch.arange(3.0), "a": torch.arange(3)})
    weight = torch.zeros(1, requires_grad=True)
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        (batch,) = strategy.experimental_distribute_dataset([given])
        assert (type(batch), list(batch)) == (type(given), ["b", "a"])
        assert [part.tolist() for part in strategy.experimental_local_results(batch["a"])] == [[0, 1], [2]]
        assert float(strategy.reduce("MEAN", batch["b"], axis=0)) == 1.0
        seen = strategy.run(lambda share: (type(share) is type(given), len(share["b"])), args=(batch,))
        assert (seen[0], seen[1].values) == (True, (2, 1))
        with strategy.scope():
            model = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.zeros_(model.weight)

        def step(share: Any) -> None:
            (model.weight * share["b"]).mean().backward()

        strategy.run(step, args=(batch,))
        (weight * given["b"]).mean().backward()
        assert float(model.weight.grad) == float(weight.grad)


def test_a_dataset_is_true_whatever_is_known_of_its_length() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        datasets = [strategy.experimental_distribute_dataset(given) for given in ([], [X], Stream())]
        assert all(datasets)
        assert strategy.distribute_datasets_from_function(lambda _: Stream())
