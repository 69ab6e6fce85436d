"""``IndexedSlices`` between replicas and workers: reduced, placed, refused where they have no meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.values import Mirrored, PerReplica

SHAPE = (5, 2)


def rows_of(replica: int, shape: Any = SHAPE) -> td.IndexedSlices:
    """Row 1, and for the second replica row 3 as well."""
    return td.IndexedSlices(torch.full((1 + replica, 2), 1.0 + replica), torch.tensor([1, 3][: 1 + replica]), shape)


def rows_here(shape: Any = SHAPE) -> td.IndexedSlices:
    return rows_of(td.get_replica_context().replica_id_in_sync_group, shape)  # type: ignore[union-attr]


def written(rows: td.IndexedSlices) -> tuple[Any, Any]:
    return rows.indices.tolist(), rows.values.tolist()


SUMMED = ([1, 1, 3], [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]])
MEANT = ([1, 1, 3], [[0.5, 0.5], [1.0, 1.0], [1.0, 1.0]])


@pytest.mark.parametrize(
    "ops",
    [td.ReductionToOneDevice(), td.HierarchicalCopyAllReduce(), td.CrossDeviceOps()],
    ids=lambda o: type(o).__name__,
)
def test_cross_device_operations_reduce_rows(two: Any, ops: td.CrossDeviceOps) -> None:
    rows = two.run(rows_here)
    total = ops.reduce(td.ReduceOp.SUM, rows, rows)
    assert isinstance(total, Mirrored)
    assert [written(part) for part in total.values] == [SUMMED, SUMMED]
    (mean,) = ops.batch_reduce(td.ReduceOp.MEAN, [(rows, "cpu:0")])
    assert written(mean) == MEANT
    mixed = PerReplica((rows_of(0), torch.ones(SHAPE)))
    assert ops.reduce(td.ReduceOp.SUM, mixed, "cpu:0").tolist() == [[1, 1], [2, 2], [1, 1], [1, 1], [1, 1]]
    copies = ops.broadcast(rows_of(0), rows)
    assert isinstance(copies, Mirrored)
    assert written(copies.values[1]) == ([1], [[1.0, 1.0]])


@pytest.mark.parametrize("value", [None, "text", [torch.ones(1), "text"]])
def test_cross_device_operations_say_what_they_take(value: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a tensor, a number, an array or IndexedSlices, got \w+: "):
        td.ReductionToOneDevice().reduce(td.ReduceOp.SUM, value, "cpu:0")


@pytest.mark.parametrize("destinations", [None, 3, ["cpu:0", "cpu:1"], ("cpu:0",)])
def test_what_is_no_place_is_refused(two: Any, destinations: Any) -> None:
    value = two.run(lambda: torch.ones(1))
    message = r"destinations must be a variable, a distributed value or a device string, got .* Write e.g. the variable"
    with pytest.raises(ValueError, match=message):
        td.ReductionToOneDevice().reduce(td.ReduceOp.SUM, value, destinations)
    with pytest.raises(ValueError, match=message):
        two.extended.reduce_to("SUM", value, destinations)


def test_rows_go_where_a_variable_lives(two: Any) -> None:
    with two.scope():
        table = td.Variable(torch.zeros(SHAPE))
    total = two.extended.reduce_to("SUM", two.run(rows_here), table)
    assert isinstance(total, Mirrored)
    assert [written(part) for part in total.values] == [SUMMED, SUMMED]
    two.extended.update(table, lambda copy, rows: copy.scatter_add(rows), args=(total,))
    assert table.value().tolist() == [[0, 0], [3, 3], [0, 0], [2, 2], [0, 0]]
    copies = two.extended.broadcast_to(rows_of(0), table)
    assert isinstance(copies, Mirrored)
    assert written(copies.values[1]) == ([1], [[1.0, 1.0]])


def test_rows_are_made_dense_along_an_axis_and_beside_dense_values(two: Any) -> None:
    rows = two.run(rows_here)
    assert two.reduce("SUM", rows, axis=0).tolist() == [5, 5]
    assert two.reduce("MEAN", rows, axis=0).tolist() == [0.5, 0.5]
    mixed = PerReplica((rows_of(0), torch.ones(SHAPE)))
    assert two.reduce("SUM", mixed, axis=None).tolist() == [[1, 1], [2, 2], [1, 1], [1, 1], [1, 1]]
    with pytest.raises(InvalidArgumentError, match="does not say how large it is; give its dense_shape"):
        two.reduce("SUM", two.run(lambda: rows_here(None)), axis=0)


def gathered_in_replica(value: Any) -> Any:
    return td.get_replica_context().all_gather(value, axis=0)  # type: ignore[union-attr]


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_rows_cannot_be_gathered(devices: list[str]) -> None:
    message = r"(?s)gather does not support IndexedSlices, got .* call it for their values and for their indices"
    with td.MirroredStrategy(devices) as strategy:
        for value in (rows_of(0), [rows_of(0)], strategy.run(rows_here)):
            with pytest.raises(NotImplementedError, match=message):
                strategy.gather(value, axis=0)
            with pytest.raises(NotImplementedError, match=message):
                strategy.run(gathered_in_replica, args=(value,))


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_rows_between_ranks(rank: int) -> None:
    with td.MultiWorkerMirroredStrategy() as strategy:
        rows = strategy.run(rows_here)
        assert written(strategy.reduce("SUM", rows, axis=None)) == SUMMED
        assert written(strategy.reduce("MEAN", rows, axis=None)) == MEANT
        assert written(strategy.extended.reduce_to("SUM", rows, "cpu:0")) == SUMMED
        (mean,) = strategy.extended.batch_reduce_to("MEAN", [(rows, "cpu:0")])
        assert written(mean) == MEANT
        assert strategy.reduce("SUM", rows, axis=0).tolist() == [5, 5]
        with pytest.raises(NotImplementedError, match="gather does not support IndexedSlices"):
            strategy.gather(rows, axis=0)
