"""Scatter writes and sparse reads of ``Variable``; ``tests/data/tf_scatter.json`` holds what TensorFlow 2.21 did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import tfstyle_dist as tfd
from tfstyle_dist import IndexedSlices, VariableAggregation, VariableSynchronization
from tfstyle_dist.core.errors import InvalidArgumentError

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "tf_scatter.json").read_text())
OPS = ("scatter_sub", "scatter_add", "scatter_mul", "scatter_div", "scatter_min", "scatter_max", "scatter_update")


def make(kind: str) -> tfd.Strategy:
    if kind == "one":
        return tfd.OneDeviceStrategy("cpu:0")
    if kind == "central":
        return tfd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
    return tfd.MirroredStrategy(["cpu:0", "cpu:1"])


def replica_rows() -> IndexedSlices:
    """What the recorded programs scatter on a replica: rows 0 and 1, or 1 and 2."""
    context = tfd.get_replica_context()
    assert context is not None
    number = context.replica_id_in_sync_group
    return IndexedSlices(torch.tensor([2.0, 4.0]) * (number + 1), torch.tensor([0, 1]) + number)


def outcome(strategy: tfd.Strategy, aggregation: str, op: str, context: str) -> Any:
    """The copies after one write, or the name of the error."""
    with strategy.scope():
        v = tfd.Variable([10.0, 20.0, 30.0], aggregation=VariableAggregation[aggregation])
    try:
        if context == "replica":
            strategy.run(lambda: [getattr(v, op)(replica_rows())][:0])
        else:
            with strategy.scope():
                assert getattr(v, op)(IndexedSlices([2.0, 4.0], [0, 1])) is v
    except NotImplementedError as error:
        return type(error).__name__
    return [part.tolist() for part in strategy.experimental_local_results(v)]


@pytest.mark.parametrize("context", ["replica", "cross"])
@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("kind", ["mirrored", "central", "one"])
def test_every_write_is_as_recorded(kind: str, aggregation: str, context: str) -> None:
    with make(kind) as strategy:
        found = {op: outcome(strategy, aggregation, op, context) for op in OPS}
    assert found == {op: RECORDED[f"{kind} {aggregation} {op} {context}"] for op in OPS}


@pytest.mark.distributed(workers=2)
def test_ranks_write_what_one_process_writes() -> None:
    for kind in ("mirrored", "central"):
        with tfd.MirroredStrategy() if kind == "mirrored" else tfd.experimental.CentralStorageStrategy() as strategy:
            rank = strategy.worker.group.rank
            for aggregation in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"):
                for op in OPS:
                    recorded = RECORDED[f"{kind} {aggregation} {op} replica"]
                    own = recorded if isinstance(recorded, str) else [recorded[rank if kind == "mirrored" else 0]]
                    assert outcome(strategy, aggregation, op, "replica") == own, (kind, aggregation, op)


def test_rows_named_twice_are_applied_in_order() -> None:
    expected = {
        "scatter_sub": [4.0, 20.0, 25.0],
        "scatter_add": [16.0, 20.0, 35.0],
        "scatter_mul": [80.0, 20.0, 150.0],
        "scatter_div": [1.25, 20.0, 6.0],
        "scatter_min": [2.0, 20.0, 5.0],
        "scatter_max": [10.0, 20.0, 30.0],
        "scatter_update": [4.0, 20.0, 5.0],
    }
    for op, value in expected.items():
        v = tfd.Variable([10.0, 20.0, 30.0])
        assert getattr(v, op)(IndexedSlices([2.0, 4.0, 5.0], [0, 0, 2])) is v
        assert v.tolist() == value, op


def test_rows_named_many_times_have_the_bits_of_one_after_the_other() -> None:
    numbers, values = torch.randint(0, 50, (200,)), torch.randn(200, 3)
    one_by_one = {
        "scatter_add": torch.add,
        "scatter_sub": torch.sub,
        "scatter_mul": torch.mul,
        "scatter_update": lambda old, value: value,
    }
    for op, apply in one_by_one.items():
        expected = torch.randn(50, 3)
        v = tfd.Variable(expected)
        getattr(v, op)(IndexedSlices(values, numbers))
        for number, value in zip(numbers.tolist(), values, strict=True):
            expected[number] = apply(expected[number], value)
        assert torch.equal(v.detach(), expected), op


def test_forms_of_a_delta() -> None:
    v = tfd.Variable([10.0, 20.0, 30.0])
    v.scatter_sub(IndexedSlices(1.0, 0))
    v.scatter_sub(IndexedSlices(1.0, [0, 1]))
    v.scatter_add(torch.sparse_coo_tensor([[2, 2]], [1.0, 2.0], (3,), check_invariants=True))
    assert v.tolist() == [8.0, 19.0, 33.0]
    m = tfd.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    m.scatter_update(IndexedSlices([[[9.0, 9.0], [7.0, 7.0]]], [[1, 2]]))
    assert m.tolist() == [[1.0, 2.0], [9.0, 9.0], [7.0, 7.0]]
    m.scatter_update(IndexedSlices(torch.zeros(0, 2), []))
    assert tfd.Variable([7, 8]).scatter_div(IndexedSlices([-2], [0])).tolist() == [-3, 8], "integers are truncated"
    own = torch.scatter_add(m, 0, torch.tensor([[0, 0]]), torch.ones(1, 2))
    assert torch.equal(m.scatter_add(0, torch.tensor([[0, 0]]), torch.ones(1, 2)), own), "torch's method of the name"
    assert torch.equal(m.scatter_add(dim=0, index=torch.tensor([[0, 0]]), src=torch.ones(1, 2)), own)


def test_wrong_deltas() -> None:
    v = tfd.Variable([10.0, 20.0, 30.0])
    with pytest.raises(TypeError, match="must be an IndexedSlices"):
        v.scatter_sub([1.0])
    with pytest.raises(TypeError, match="must be an IndexedSlices"):
        v.scatter_add([1.0])
    for row in (3, -1):
        with pytest.raises(InvalidArgumentError, match=rf"indices\[0\] = {row} is not in \[0, 3\)"):
            v.scatter_sub(IndexedSlices([1.0], [row]))
    with pytest.raises(InvalidArgumentError, match=r"values\.shape = indices\.shape \+"):
        v.scatter_sub(IndexedSlices([[1.0, 2.0]], [0]))
    with pytest.raises(InvalidArgumentError, match=r"float32, but the slices have torch\.int64"):
        v.scatter_sub(IndexedSlices([1], [0]))
    with pytest.raises(TypeError, match=r"int32 or int64 row numbers, got torch\.float32"):
        IndexedSlices([1.0], [0.5])
    assert v.tolist() == [10.0, 20.0, 30.0]


def test_batch_scatter_update() -> None:
    b = tfd.Variable([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    b.batch_scatter_update(IndexedSlices([[10.0, 20.0], [30.0, 40.0]], [[0, 2], [1, 0]]))
    assert b.tolist() == [[10.0, 2.0, 20.0], [40.0, 30.0, 6.0]]
    b.batch_scatter_update(IndexedSlices([[9.0, 9.0, 9.0]], [1]))
    assert b.tolist() == [[10.0, 2.0, 20.0], [9.0, 9.0, 9.0]]
    with pytest.raises(InvalidArgumentError, match="batch_scatter_update"):
        b.batch_scatter_update(IndexedSlices([[1.0]], [[0, 1]]))
    with make("mirrored") as strategy:
        with strategy.scope():
            v = tfd.Variable([[1.0]])
        with pytest.raises(NotImplementedError, match="batch_scatter_update"):
            strategy.run(lambda: v.batch_scatter_update(IndexedSlices([[5.0]], [0])))


def test_on_read_variables_have_no_scatter_writes() -> None:
    with make("mirrored") as strategy:
        with strategy.scope():
            v = tfd.Variable(
                [1.0], synchronization=VariableSynchronization.ON_READ, aggregation=VariableAggregation.SUM
            )
        with pytest.raises(NotImplementedError, match="ON_READ` doesn't support `scatter_add`"):
            strategy.run(lambda: v.scatter_add(IndexedSlices([2.0], [0])))


def test_copies_have_scatter_writes_of_their_own() -> None:
    with make("mirrored") as strategy, strategy.scope():
        v = tfd.Variable([1.0, 2.0])
        strategy.extended.update(v, lambda copy, delta: copy.scatter_add(delta), args=(IndexedSlices([5.0], [1]),))
        assert [part.tolist() for part in strategy.experimental_local_results(v)] == [[1.0, 7.0], [1.0, 7.0]]


def test_reads_of_rows_and_places() -> None:
    m = tfd.Variable([[1.0, 2.0], [3.0, 4.0], [7.0, 7.0]])
    assert m.sparse_read([2, 0]).tolist() == [[7.0, 7.0], [1.0, 2.0]]
    assert m.sparse_read(torch.tensor([[2, 0]])).tolist() == [[[7.0, 7.0], [1.0, 2.0]]]
    assert m.gather_nd([[2, 0], [0, 1]]).tolist() == [7.0, 2.0]
    assert m.gather_nd([[2], [0]]).tolist() == [[7.0, 7.0], [1.0, 2.0]]
    with pytest.raises(InvalidArgumentError, match=r"sparse_read.*= 5 is not in \[0, 3\)"):
        m.sparse_read([5])
    with pytest.raises(InvalidArgumentError, match="gather_nd"):
        m.gather_nd([[5]])
    with make("mirrored") as strategy:
        with strategy.scope():
            v = tfd.Variable([[10.0], [20.0]], aggregation=VariableAggregation.SUM)

        def step() -> Any:
            (grad,) = torch.autograd.grad(v.sparse_read([1, 1]).sum() + v.gather_nd([[0, 0]]).sum(), [v])
            return grad

        for grad in strategy.run(step).values:
            assert grad.tolist() == [[1.0], [2.0]]


def test_constraints() -> None:
    halved = tfd.Variable([3.0, 4.0], constraint=lambda value: value * 0.5)
    assert halved.constraint is not None
    assert halved.constraint(halved).tolist() == [1.5, 2.0]
    assert halved.assign([9.0, 9.0]).tolist() == [9.0, 9.0], "assign does not call it"
    assert tfd.Variable(1.0).constraint is None
    with pytest.raises(ValueError, match="`constraint` must be None or a callable, got 3"):
        tfd.Variable(1.0, constraint=3)  # type: ignore[arg-type]
    optimizer = tfd.train.GradientDescentOptimizer(1.0)
    optimizer.apply_gradients([(torch.tensor([1.0, 1.0]), halved)])
    assert halved.tolist() == [4.0, 4.0]
    for kind in ("mirrored", "central"):
        with make(kind) as strategy:
            with strategy.scope():
                v = tfd.Variable([3.0, 4.0], constraint=lambda value: value.clamp(max=1.0))
            strategy.run(lambda v=v: optimizer.apply_gradients([(torch.tensor([1.0, 9.0]), v)]))
            copies = strategy.experimental_local_results(v)
            assert [p.tolist() for p in copies] == [[1.0, -14.0]] * len(copies)


@pytest.mark.parametrize("kind", ["mirrored", "one", "wrapped"])
def test_an_optimizer_of_torch_that_calls_no_constraint_says_so(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "tfstyle_dist")
    with make("mirrored") if kind != "one" else tfd.OneDeviceStrategy("cpu:0") as strategy:
        with strategy.scope():
            v = tfd.Variable([5.0], name="bounded", constraint=lambda value: value.clamp(max=1.0))
            free = tfd.Variable([5.0])
        sgd = torch.optim.SGD([v, free], lr=1.0)
        optimizer = tfd.train.Optimizer(sgd) if kind == "wrapped" else sgd

        def step() -> None:
            if kind == "wrapped":
                optimizer.minimize(lambda: (v * free).sum(), var_list=[v, free])
            else:
                (v * free).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        for _ in range(3):
            strategy.run(step)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "Variable 'bounded' has a constraint, but was written by an operation of torch"
    )


@pytest.mark.parametrize("context", ["replica", "cross"])
@pytest.mark.parametrize("function", [functional.embedding, functional.embedding_bag])
def test_rows_that_are_bounded_when_they_are_looked_up_are_so_in_every_copy(function: Any, context: str) -> None:
    """``max_norm`` writes to the table, though the name of the function does not say so."""
    numbers, expected = torch.tensor([[0, 2]]), torch.arange(6.0).view(3, 2)
    function(numbers, expected, max_norm=1.5)
    with make("mirrored") as strategy:
        with strategy.scope():
            v = tfd.Variable(torch.arange(6.0).view(3, 2))

        def look_up() -> None:
            function(numbers.to(v.device), v, max_norm=1.5)

        if context == "cross":
            look_up()
        else:
            strategy.run(look_up)
        for copy in strategy.experimental_local_results(v):
            torch.testing.assert_close(torch.as_tensor(copy).cpu(), expected, check_device=False)
