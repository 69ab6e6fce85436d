"""What the input notes of shares that differ, and what a step is told of them."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import tfstyle_dist as td
from tfstyle_dist.input.sharding import chunks
from tfstyle_dist.values import Division, cut_evenly, has_unequal_shares

pytestmark = pytest.mark.timeout(60)


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 9))
def test_a_division_is_that_of_the_pieces(size: int, replicas: int) -> None:
    sizes = [len(piece) for piece in chunks(size, replicas)]
    assert cut_evenly(size, replicas) == Division.of(sizes)
    assert cut_evenly(size, replicas).even == (len(set(sizes)) == 1)


def examples_seen(strategy: td.Strategy, batch: Any) -> list[int | None]:
    """The sizes of the shares that the replicas were told of."""

    def step(*_: Any) -> list[int]:
        context = td.get_replica_context()
        assert context is not None
        return [-1 if context.share is None else context.share.examples]

    found = [strategy.experimental_local_results(part) for part in strategy.run(step, args=(batch,))]
    return [number for part in found for number in (part * 2 if len(part) == 1 else part)]


class Words(dict):  # type: ignore[type-arg]
    """What a tokenizer returns: a mapping that is no plain dict."""


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 2),
        np.zeros((3, 2)),
        ["a", "b", "c"],
        {"x": [torch.zeros(3), None], "words": ["a", "b", "c"]},
        Words(x=torch.zeros(3)),
        torch.zeros(3, 2).to_sparse(),
    ],
    ids=["tensor", "array", "texts", "nest", "mapping", "sparse"],
)
def test_a_step_is_told_of_shares_that_differ(batch: Any) -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        (uneven,) = strategy.experimental_distribute_dataset([batch])
        assert examples_seen(strategy, uneven) == [2, 1]


def test_texts_of_an_empty_share_are_known() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        (uneven,) = strategy.experimental_distribute_dataset([["a"]])
        assert examples_seen(strategy, uneven) == [1, 0]


def test_equal_shares_are_not_noted_and_nothing_is_kept() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        (even,) = strategy.experimental_distribute_dataset([torch.zeros(4)])
        assert examples_seen(strategy, even) == [-1, -1]
        (uneven,) = strategy.experimental_distribute_dataset([torch.zeros(3)])
        assert has_unequal_shares([uneven])
        parts = [part.clone() for part in strategy.experimental_local_results(uneven)]
        assert not has_unequal_shares(parts)
        del uneven
        gc.collect()


def test_what_was_noted_of_a_tensor_does_not_stay_when_it_comes_again() -> None:
    """``dataset_fn`` gives the user's own tensors, here in another order in the second epoch."""
    long, short = torch.zeros(3), torch.zeros(1)
    pairs = iter([[long, short], [long, torch.zeros(3)]])

    class Again:
        def __iter__(self) -> Any:
            return iter(next(pairs))

    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        batches = strategy.distribute_datasets_from_function(lambda _: Again())
        found = [examples_seen(strategy, batch) for _ in range(2) for batch in batches]
    assert found == [[3, 1], [-1, -1]]


def test_batches_that_cannot_be_counted_weigh_the_same() -> None:
    """A graph: its nodes and its edges are of different numbers."""
    graphs = [{"nodes": torch.zeros(n, 2), "edges": torch.zeros(2, 2 * n)} for n in (3, 1)]
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        (batch,) = strategy.distribute_datasets_from_function(lambda _: graphs)
        assert has_unequal_shares([batch])
        assert examples_seen(strategy, batch) == [-1, -1]
