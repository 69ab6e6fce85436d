"""Batches of sparse and of nested tensors are divided like dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tfstyle_dist as td
from tfstyle_dist.input.split import TensorSpec, describe, from_description, slice_batch

pytestmark = [  # what torch says about its own kinds of tensors
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
]
THREE = ["cpu:0", "cpu:1", "cpu:2"]
ROWS = [torch.arange(float(n + 1)) + 10 * n for n in range(5)]


def sparse(count: int) -> torch.Tensor:
    return torch.diag(torch.arange(1.0, 6.0))[:count].to_sparse()


def partly_sparse(count: int) -> torch.Tensor:
    return torch.arange(1.0, 11.0).reshape(5, 2)[:count].to_sparse(1)


def nested(count: int) -> torch.Tensor:
    return torch.nested.nested_tensor(ROWS[:count])


def jagged(count: int) -> torch.Tensor:
    return torch.nested.nested_tensor(ROWS[:count], layout=torch.jagged)


KINDS = [sparse, partly_sparse, nested, jagged]


def rows(tensor: torch.Tensor) -> list[Any]:
    """What a batch holds, row by row."""
    return [row.tolist() for row in (tensor.unbind() if tensor.is_nested else tensor.to_dense())]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "sizes"), [(5, [2, 2, 1]), (3, [1, 1, 1]), (1, [1, 0, 0])])
def test_shares_are_those_of_a_dense_batch(kind: Callable[[int], torch.Tensor], count: int, sizes: list[int]) -> None:
    batch = {"x": kind(count), "y": torch.arange(count)}
    with td.MirroredStrategy(THREE) as strategy:
        (step,) = strategy.experimental_distribute_dataset([batch])
        seen = strategy.experimental_local_results(strategy.run(lambda share: [share["x"], share["y"]], args=(step,)))
    assert [share[0].size(0) for share in seen] == [len(share[1]) for share in seen] == sizes
    assert [row for share in seen for row in rows(share[0])] == rows(batch["x"])
    assert {(share[0].layout, share[0].dtype) for share in seen} == {(batch["x"].layout, torch.float32)}


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_replicas_and_the_empty_ones_after_them(kind: Callable[[int], torch.Tensor]) -> None:
    with td.MirroredStrategy(THREE) as strategy:
        dataset = strategy.distribute_datasets_from_function(lambda context: [kind(2), kind(1)])
        (step,) = dataset
        assert [part.size(0) for part in strategy.experimental_local_results(step)] == [2, 1, 0]
        spec = strategy.experimental_local_results(dataset.element_spec)[0]
    width = {"sparse": 5, "partly_sparse": 2}.get(kind.__name__)
    assert spec == TensorSpec((None, width), torch.float32)


def test_a_loader_whose_batches_are_nested() -> None:
    loader = DataLoader(ROWS, batch_size=3, collate_fn=torch.nested.nested_tensor)  # type: ignore[arg-type]
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        seen = [
            [rows(part) for part in strategy.experimental_local_results(step)]
            for step in strategy.experimental_distribute_dataset(loader)
        ]
    expected = [row.tolist() for row in ROWS]
    assert seen == [[expected[:2], expected[2:3]], [expected[3:4], expected[4:]]]


@pytest.mark.distributed(workers=2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_data_gets_empty_batches_of_the_kind(
    strategy: td.Strategy, kind: Callable[[int], torch.Tensor], rank: int
) -> None:
    dataset = strategy.distribute_datasets_from_function(
        lambda context: [kind(2)] if context.input_pipeline_id == 0 else []
    )
    (batch,) = dataset
    assert batch.size(0) == (2 if rank == 0 else 0)
    assert (batch.layout, batch.is_nested, batch.dtype) == (kind(1).layout, kind(1).is_nested, torch.float32)
    shared = [row for step in strategy.experimental_distribute_dataset([kind(5)]) for row in rows(step)]
    assert shared == (rows(kind(5))[:3] if rank == 0 else rows(kind(5))[3:])


def test_jagged_tensors_of_one_raggedness_stay_so() -> None:
    """As a sequence and its mask: they can be multiplied, on every replica, also where there are no examples."""
    x = jagged(5)
    batch = {"x": x, "mask": [torch.nested.nested_tensor_from_jagged(torch.full((15,), 2.0), offsets=x.offsets())]}
    with td.MirroredStrategy(THREE) as strategy:

        def doubled(share: Any) -> torch.Tensor:
            return (share["x"] * share["mask"][0]).values().sum().reshape(1)

        (step,) = strategy.experimental_distribute_dataset([batch])
        seen = [float(s) for s in strategy.experimental_local_results(strategy.run(doubled, args=(step,)))]
    expected = [2 * sum(float(row.sum()) for row in part) for part in (ROWS[:2], ROWS[2:4], ROWS[4:])]
    assert seen == expected
    template = from_description(describe(slice_batch(batch, range(0))))
    assert (template["x"] * template["mask"][0]).size(0) == 0


def test_what_cannot_be_divided_says_so() -> None:
    compressed = torch.eye(4).to_sparse_csr()
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with pytest.raises(TypeError, match=r"layout torch\.sparse_csr cannot be split .*to_sparse\(\)"):
            list(strategy.experimental_distribute_dataset([compressed]))
        for wrong, name in ((compressed, "layout torch.sparse_csr"), (nested(2), "nested"), (jagged(2), "nested")):
            value = strategy.experimental_distribute_values_from_function(lambda context, wrong=wrong: wrong)
            for call in (
                lambda value=value: strategy.reduce("SUM", value, axis=None),
                lambda value=value: strategy.reduce("MEAN", value, axis=0),
                lambda value=value: strategy.gather(value, axis=0),
                lambda wrong=wrong: strategy.run(lambda: td.get_replica_context().all_reduce("SUM", wrong)),
                lambda wrong=wrong: strategy.run(lambda: td.get_replica_context().all_gather(wrong, axis=0)),
            ):
                with pytest.raises(ValueError, match=f"{name}.* cannot be combined over replicas: make it dense"):
                    call()
