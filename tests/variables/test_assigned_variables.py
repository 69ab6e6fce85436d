"""Variables that are assigned variables, and variables of one copy; the numbers are what TensorFlow 2.21 gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from this_replica import replica

import tfstyle_dist as tfd
from tfstyle_dist import IndexedSlices, VariableAggregation, VariableSynchronization
from tfstyle_dist.core.errors import InvalidArgumentError

ON_READ = VariableSynchronization.ON_READ
SUM, MEAN, NONE = VariableAggregation.SUM, VariableAggregation.MEAN, VariableAggregation.NONE


def copies(strategy: tfd.Strategy, variable: Any) -> list[Any]:
    return [part.tolist() for part in strategy.experimental_local_results(variable)]


@pytest.fixture
def three() -> Any:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        yield strategy


def test_a_variable_that_is_added_to_itself_stays_the_same_everywhere(three: tfd.Strategy) -> None:
    with three.scope():
        v = tfd.Variable([2.0, -0.5], aggregation=SUM)
    v.assign_add(v)
    assert copies(three, v) == [[4.0, -1.0]] * 3
    v.assign_sub(three.experimental_local_results(v)[0])
    assert copies(three, v) == [[0.0, 0.0]] * 3
    v.assign([1.0, 2.0])
    three.extended.update(v, lambda copy, x: copy.assign_add(x), args=(v,))
    assert copies(three, v) == [[2.0, 4.0]] * 3


def test_rows_of_itself_are_added_alike(three: tfd.Strategy) -> None:
    with three.scope():
        v = tfd.Variable([[1.0, 2.0], [3.0, 4.0]])
    v.scatter_add(IndexedSlices(v, [1, 0]))
    assert copies(three, v) == [[[4.0, 6.0], [4.0, 6.0]]] * 3


def test_each_copy_is_given_what_its_replica_reads(three: tfd.Strategy) -> None:
    with three.scope():
        v = tfd.Variable(1.0, aggregation=MEAN)
        parts = tfd.Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def step() -> None:
        parts.assign_add(torch.tensor(float(replica())))

    three.run(step)
    assert float(parts) == 3.0
    v.assign_add(parts)
    assert copies(three, v) == [1.0, 2.0, 3.0]


def test_a_variable_that_is_read_together_is_read_once_when_it_is_added_to_itself(three: tfd.Strategy) -> None:
    with three.scope():
        v = tfd.Variable(0.0, synchronization=ON_READ, aggregation=MEAN)
    three.run(lambda: v.assign(torch.tensor(replica() + 1.0)).value())
    v.assign_add(v)
    assert copies(three, v) == [3.0, 4.0, 5.0]


def test_shares_of_whole_numbers_are_rounded_towards_zero(three: tfd.Strategy) -> None:
    with three.scope():
        v = tfd.Variable([0, 0, 0], synchronization=ON_READ, aggregation=SUM)
    v.assign([7, -7, -2])
    assert copies(three, v) == [[2, -2, 0]] * 3


@pytest.mark.parametrize("kind", [tfd.OneDeviceStrategy, tfd.distribute.get_strategy])
def test_a_variable_with_one_copy_is_read_whatever_its_policies(kind: Any) -> None:
    strategy = kind("cpu:0") if kind is tfd.OneDeviceStrategy else kind()
    with strategy.scope():
        v = tfd.Variable(2.0, synchronization=ON_READ, aggregation=NONE)
    assert float(v * 1) == 2.0
    assert v.synchronization is ON_READ
    assert not v.trainable


def test_one_central_copy_is_no_value_of_each_replica() -> None:
    with tfd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0") as strategy:
        with strategy.scope():
            v = tfd.Variable([1.0, 2.0], aggregation=SUM)
            whole = tfd.Variable([1, 2], aggregation=MEAN)
        assert strategy.gather(v, axis=0).tolist() == [1.0, 2.0]
        with pytest.raises(ValueError, match="cannot be reduced with SUM"):
            strategy.reduce("SUM", v, axis=None)
        assert strategy.reduce("SUM", v, axis=0) == 6.0
        with pytest.raises(ValueError, match="the mean of 2 replicas' values is no"):
            strategy.run(lambda: whole.assign_add(torch.tensor([1, 1])))
        assert copies(strategy, whole) == [[1, 2]]


def test_one_replica_s_sum_of_a_variable_is_its_value() -> None:
    with tfd.MirroredStrategy(["cpu:0"]) as strategy:
        with strategy.scope():
            v = tfd.Variable(2.0, synchronization=ON_READ, aggregation=NONE)
        assert strategy.reduce("SUM", v, axis=None) == 2.0


@pytest.mark.parametrize("make", [tfd.distribute.get_strategy, tfd.OneDeviceStrategy, tfd.MirroredStrategy])
@pytest.mark.parametrize("kind", [ON_READ, tfd.VariableSynchronization.AUTO])
def test_what_one_replica_reduces_is_what_the_variable_held(make: Any, kind: Any) -> None:
    """It was the variable itself, in which a later ``assign`` is seen; TensorFlow gives a tensor."""
    given = {tfd.OneDeviceStrategy: ("cpu:0",), tfd.MirroredStrategy: (["cpu:0"],)}.get(make, ())
    strategy = make(*given)
    with strategy.scope():
        variable = tfd.Variable([1.0], synchronization=kind, aggregation=SUM)

    def step() -> tuple[Any, ...]:
        context: Any = tfd.get_replica_context()
        kept = torch.ones(1)
        nested = context.all_reduce("SUM", {"variable": variable, "others": [kept]})
        assert nested["others"][0] is kept
        got = context.all_reduce("MEAN", variable), nested["variable"], context.all_gather(variable, axis=0)
        if variable.requires_grad:
            sum(got).sum().backward()
            assert variable.grad.tolist() == [3.0]
        variable.assign_add([5.0])
        return got

    for own in strategy.run(step):
        assert type(own) is torch.Tensor
        assert own.tolist() == [1.0]
    assert variable.tolist() == [6.0]


@pytest.mark.parametrize(("op", "share"), [("SUM", 1.0), ("MEAN", 3.0)])
def test_rows_are_reduced_to_the_rows_of_all(three: tfd.Strategy, op: str, share: float) -> None:
    def step() -> tuple[IndexedSlices, IndexedSlices]:
        context = tfd.get_replica_context()
        assert context is not None
        mine = IndexedSlices(torch.full([replica() + 1, 2], 3.0), torch.arange(replica() + 1), [4, 2])
        return mine, context.all_reduce(op, {"rows": mine, "dense": torch.ones(2)})["rows"]

    given, everywhere = three.run(step)
    for found in (three.reduce(op, given, axis=None), *three.experimental_local_results(everywhere)):
        assert found.indices.tolist() == [0, 0, 1, 0, 1, 2]
        assert found.values.tolist() == [[3.0 / share] * 2] * 6
        assert found.dense_shape == (4, 2)


def test_a_gradient_comes_back_through_reduced_rows(three: tfd.Strategy) -> None:
    def step() -> torch.Tensor:
        context = tfd.get_replica_context()
        assert context is not None
        leaf = torch.ones(1, 2, requires_grad=True)
        rows = context.all_reduce("SUM", IndexedSlices(leaf, [0]))
        (rows.values * torch.tensor([[1.0], [10.0], [100.0]])).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert copies(three, three.run(step)) == [[[3.0, 3.0]], [[30.0, 30.0]], [[300.0, 300.0]]]


def test_what_an_assignment_gives_each_replica_is_its_own_copy() -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            v = tfd.Variable(1.0)
            rows = tfd.Variable([1.0, 2.0])

        def step() -> tuple[Any, Any]:
            number = replica() + 1
            v.assign_add(torch.tensor(9.0 * number)).assign_add(torch.tensor(1.0 * number))
            delta = IndexedSlices(torch.tensor([10.0 * number]), torch.tensor([1]))
            return v.assign_add(torch.tensor(0.0)), rows.scatter_add(delta)

        written, scattered = strategy.run(step)
        assert copies(strategy, written) == [11.0, 21.0]
        assert float(strategy.reduce("MEAN", written, axis=None)) == 16.0
        assert float(strategy.reduce("SUM", written, axis=None)) == 32.0
        assert strategy.reduce("MEAN", scattered, axis=None).tolist() == [1.0, 17.0]
        assert float(strategy.reduce("MEAN", v, axis=None)) == 11.0, (
            "the variable itself: the first copy, as in TensorFlow"
        )


def test_a_variable_of_one_replica_is_gathered_without_an_aggregation() -> None:
    with tfd.MirroredStrategy(["cpu:0"]) as strategy:
        with strategy.scope():
            v = tfd.Variable([1.0, 2.0], synchronization=ON_READ)
        strategy.run(lambda: v.assign_add(torch.tensor([1.0, 1.0])))
        gathered = strategy.gather(v, axis=0)
        assert gathered.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("op", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize(
    ("first", "value", "told"),
    [
        (
            torch.tensor(7),
            0.75,
            "assigned 0.75, of torch.float32, but its dtype is torch.int64, which has no fractions",
        ),
        (torch.tensor(7), 2.0, "has no fractions"),
        (torch.tensor(7), np.float32(1.5), "has no fractions"),
        (torch.tensor([7]), np.array([1.5]), "of torch.float64, but its dtype is torch.int64"),
        (torch.tensor([7, 7]), [1, 0.5], "has no fractions"),
        (torch.tensor([7]), [torch.tensor(0.5)], "has no fractions"),
        (torch.tensor(True), 1.0, "torch.bool, which has no fractions"),
        (torch.tensor(7.0), 1j, "torch.float32, which has no imaginary parts"),
        (torch.tensor(7, dtype=torch.uint8), -1, "outside of what torch.uint8 can hold"),
        (torch.tensor([7], dtype=torch.uint8), np.array([256]), "outside of what torch.uint8 can hold"),
        (torch.tensor(7, dtype=torch.int32), 2**40, "outside of what torch.int32 can hold"),
        (torch.tensor(True), 2, "outside of what torch.bool can hold"),
        (torch.tensor(7.0), 1e300, "outside of what torch.float32 can hold"),
    ],
)
def test_what_the_dtype_would_cut_off_is_refused(
    three: tfd.Strategy, first: Any, value: Any, told: str, op: str
) -> None:
    with three.scope():
        v = tfd.Variable(first, synchronization=ON_READ, aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
    plain = tfd.Variable(first)
    for write in (lambda: three.run(lambda: getattr(v, op)(value)), lambda: getattr(plain, op)(value)):
        with pytest.raises(InvalidArgumentError, match=told):
            write()
    assert copies(three, v) == [first.tolist()] * 3
    assert plain.tolist() == first.tolist()


@pytest.mark.parametrize(
    ("first", "value"),
    [(7.0, 2), (7.0, 2**70), (7.0, float("inf")), ([7.0], np.array([2])), (7, True), (True, 0), (7, np.int32(2))],
)
def test_what_the_dtype_holds_is_taken(first: Any, value: Any) -> None:
    v = tfd.Variable(first)
    assert torch.equal(
        v.assign(value).value(), torch.as_tensor(value).to(v.dtype) if value != 2**70 else 2.0**70 + v * 0
    )


def test_first_values_and_rows_that_the_dtype_would_cut_off_are_refused() -> None:
    for value in (1.7, [1.0], np.array([1.7]), torch.tensor(1.7)):
        with pytest.raises(ValueError, match=r"given the initial_value .* torch.int32, which has no fractions"):
            tfd.Variable(value, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"outside of what torch\.uint8 can hold"):
        tfd.Variable(-1, dtype=torch.uint8)
    assert tfd.Variable([], dtype=torch.int32).tolist() == []
    v = tfd.Variable([1, 2])
    with pytest.raises(InvalidArgumentError, match="scatter_nd_update: variable 'Variable' was given the updates"):
        v.scatter_nd_update([[0]], [1.5])
    assert v.scatter_nd_update([[0]], [3]).tolist() == [3, 2]


@pytest.mark.parametrize(
    ("dtype", "meant"),
    [("int64", torch.int64), ("torch.int8", torch.int8), ("bfloat16", torch.bfloat16), (np.float64, torch.float64),
     (np.dtype("int16"), torch.int16), (bool, torch.bool), (int, torch.int64), (float, torch.float32)],
)  # fmt: skip
def test_a_dtype_may_be_named_as_programs_for_tensorflow_name_it(
    three: tfd.Strategy, dtype: Any, meant: torch.dtype
) -> None:
    with three.scope():
        for value in (0, torch.tensor(False), lambda: np.zeros((), np.bool_)):
            assert tfd.Variable(value, dtype=dtype, aggregation=SUM).dtype == meant
    for none in ("string", "Tensor", object(), 3):
        with pytest.raises(ValueError, match=r"dtype must be one of torch, e\.g\. torch\.float32"):
            tfd.Variable(0, dtype=none)  # type: ignore[arg-type]


def test_a_shape_may_be_asked_for(three: tfd.Strategy) -> None:
    with three.scope():
        for value, shape in ((0, ()), (0, []), ([[1, 2]], (None, 2)), ([1, 2], 2), (torch.ones(3), torch.Size([3]))):
            v = tfd.Variable(value, dtype=torch.int64 if shape != torch.Size([3]) else None, shape=shape)
            assert list(v.shape) == list(torch.as_tensor(value).shape)
        for wrong in ((2,), (1, 1), (None, None, None)):
            with pytest.raises(
                ValueError, match=r"shape \(3,\) is not compatible with the explicitly supplied `shape`"
            ):
                tfd.Variable(lambda: [1.0, 2.0, 3.0], shape=wrong)


def mine() -> torch.Tensor:
    return torch.tensor(float(tfd.get_replica_context().replica_id_in_sync_group + 1))


@pytest.mark.parametrize(
    ("aggregation", "total", "left"),
    [
        (SUM, [16.0] * 3, [4.0] * 3),
        (MEAN, [12.0] * 3, [8.0] * 3),
        (VariableAggregation.ONLY_FIRST_REPLICA, [11.0] * 3, [9.0] * 3),
        (NONE, [11.0, 12.0, 13.0], [9.0, 8.0, 7.0]),
    ],
)
def test_operators_in_place_add_as_the_aggregation_says(
    three: tfd.Strategy, aggregation: Any, total: list[float], left: list[float]
) -> None:
    with three.scope():
        added, taken, vector = (
            tfd.Variable(first, False, aggregation=aggregation) for first in (10.0, 10.0, [10.0] * 2)
        )

    meter = SimpleNamespace(added=added, taken=taken, vector=vector)

    def step() -> None:
        meter.added += mine()
        meter.taken -= mine()
        meter.vector += mine().double()  # which torch converts and expands

    three.run(step)
    assert (meter.added is added, meter.taken is taken, meter.vector is vector) == (True, True, True)
    assert copies(three, added) == total
    assert copies(three, taken) == left
    assert copies(three, vector) == [[value] * 2 for value in total]


def test_operators_in_place_on_what_each_replica_has(three: tfd.Strategy) -> None:
    with three.scope():
        v = tfd.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
        w = tfd.Variable(0.0, False, aggregation=SUM)

    def step() -> None:
        nonlocal v
        v += 1.0
        v += mine()

    three.run(step)
    assert copies(three, v) == [2.0, 3.0, 4.0]
    three.extended.update(w, lambda copy: copy.__iadd__(2.0))
    w += 1.0  # outside of a step: every copy
    assert copies(three, w) == [3.0] * 3


def test_operators_in_place_are_refused_as_assignments_are(three: tfd.Strategy) -> None:
    with three.scope():
        v = tfd.Variable(0.0, False, aggregation=SUM)
        trained, whole = tfd.Variable(0.0, aggregation=SUM), tfd.Variable(0, aggregation=SUM)
    for variable, value, told in (
        (v, 1.0, "cannot be reduced: variable 'Variable' has aggregation SUM"),
        (trained, torch.tensor(1.0), "a leaf Variable that requires grad"),
        (whole, torch.tensor(0.5), "can't be cast to the desired output type Long"),
        (v, torch.ones(2), r"shape \[\] doesn't match the broadcast shape \[2\]"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=told):
            three.run(lambda variable=variable, value=value: variable.__iadd__(value) and None)
    central = tfd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
    with central.scope():
        w = tfd.Variable(0.0, False)
        summed = tfd.Variable(0.0, False, aggregation=SUM)
    with pytest.raises(ValueError, match="You must specify an aggregation method"):
        central.run(lambda: w.__iadd__(mine()) and None)
    central.run(lambda: summed.__iadd__(mine()) and None)
    assert summed.numpy() == 3.0
    central.close()
