"""Adadelta, ``variables``, ``skip_gradients_aggregation`` and ``stop_gradients``: the numbers are TensorFlow 2.21's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as tfd
from tfstyle_dist.train import gradients

GRADIENTS = ([0.1, -0.2, 0.3], [1.0, 2.0, -3.0], [0.0, 1e-3, 5.0])


def two_variables(optimizer: Any) -> tuple[tfd.Variable, list[list[float]]]:
    """Three steps of the recorded program; the variable and the optimizer's variables."""
    w, b = tfd.Variable([1.0, 2.0, 3.0], name="w"), tfd.Variable([0.5], name="b")
    assert optimizer.variables() == []
    for grad in GRADIENTS:
        optimizer.apply_gradients([(torch.tensor(grad), w), (torch.tensor([0.7]), b)])
    return w, [v.reshape(-1).tolist() for v in optimizer.variables()]


def test_adadelta() -> None:
    optimizer = tfd.train.AdadeltaOptimizer(0.5, 0.9, 1e-6)
    w, state = two_variables(optimizer)
    torch.testing.assert_close(w.detach(), torch.tensor([0.9961941242, 1.9993534088, 2.9979407787]))
    assert optimizer.get_slot_names() == ["accum", "accum_update"]
    expected = [
        [0.13279002904891968],
        [2.8468411983340047e-06],
        [0.09081001579761505, 0.36324015259742737, 3.3172905445098877],
        [2.5922261102095945e-06, 2.593515546323033e-06, 5.519294063560665e-06],
    ]
    for ours, theirs in zip(state, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    w, _ = two_variables(tfd.train.AdadeltaOptimizer())
    torch.testing.assert_close(w.detach(), torch.tensor([0.9999988675, 1.9999998808, 2.9999995232]))


def test_adadelta_of_rows() -> None:
    optimizer = tfd.train.AdadeltaOptimizer(0.5, 0.9, 1e-6)
    v = tfd.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], name="w")
    grad = torch.sparse_coo_tensor([[2, 0, 2]], [[1.0, 2.0], [3.0, 4.0], [1.0, 1.0]], (3, 2), check_invariants=True)
    for _ in range(2):
        optimizer.apply_gradients([(grad, v)])
    expected = [[0.9967966676, 1.9967966080], [3.0, 4.0], [4.9967966080, 5.9967966080]]
    torch.testing.assert_close(v.detach(), torch.tensor(expected))
    accum = [[1.7100003958, 3.0400006771], [0.0, 0.0], [0.7600001693, 1.7100003958]]
    torch.testing.assert_close(optimizer.variables()[0], torch.tensor(accum))


def test_variables_come_sorted_by_name() -> None:
    _, adam = two_variables(tfd.train.AdamOptimizer(0.1))
    expected = [
        [0.18970003724098206],
        [0.0014685115311294794],
        [0.6560999155044556],  # beta1_power
        [0.9960060715675354],  # beta2_power
        [0.09810002148151398, 0.16390003263950348, 0.2543001174926758],
        [0.001008966937661171, 0.004035869147628546, 0.0340803824365139],
    ]
    for ours, theirs in zip(adam, expected, strict=True):
        # TensorFlow rounds 1 - 0.999 to float32, which is 1.3e-5 less.
        assert ours == pytest.approx(theirs, rel=2e-5)
    _, centered = two_variables(tfd.train.RMSPropOptimizer(0.1, centered=True))
    firsts = [
        0.8617900013923645,
        0.18970003724098206,
        0.07702994346618652,
        0.8198099732398987,
        0.09810002148151398,
        0.0,
    ]
    assert [values[0] for values in centered] == pytest.approx(firsts, rel=1e-6)
    assert two_variables(tfd.train.GradientDescentOptimizer(0.1))[1] == []
    model = nn.Linear(2, 1)
    wrapped = tfd.train.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    wrapped.minimize(model(torch.ones(1, 2)).sum())
    assert [tuple(v.shape) for v in wrapped.variables()] == [(1, 2), (1,)]


def own_gradients(strategy: tfd.Strategy, optimizer: Any, v: Any, skip: bool, reduce_first: bool = False) -> Any:
    def step() -> None:
        context = tfd.get_replica_context()
        assert context is not None
        grad = torch.tensor([1.0, 2.0]) * (context.replica_id_in_sync_group + 1)
        if reduce_first:
            grad = context.all_reduce("SUM", grad)
        optimizer.apply_gradients([(grad, v)], None, None, skip)

    strategy.run(step)
    return [part.tolist() for part in strategy.experimental_local_results(v)]


@pytest.mark.parametrize("aggregation", ["NONE", "SUM"])
def test_skipped_aggregation_is_as_recorded(aggregation: str) -> None:
    optimizer = tfd.train.GradientDescentOptimizer(1.0)
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            v = tfd.Variable([10.0, 20.0], aggregation=tfd.VariableAggregation[aggregation])
        assert own_gradients(strategy, optimizer, v, skip=False) == [[7.0, 14.0], [7.0, 14.0]]
        assert own_gradients(strategy, optimizer, v, skip=True) == [[6.0, 12.0], [5.0, 10.0]]
        with strategy.scope(), pytest.raises(ValueError, match="in cross-replica context"):
            optimizer.apply_gradients([(torch.ones(2), v)], skip_gradients_aggregation=True)


@pytest.mark.parametrize("kind", ["AdamOptimizer", "MomentumOptimizer"])
def test_gradients_that_were_reduced_by_hand(kind: str) -> None:
    make = lambda: getattr(tfd.train, kind)(*([0.1, 0.9] if kind == "MomentumOptimizer" else [0.1]))  # noqa: E731
    results = []
    for skip in (False, True):
        optimizer = make()
        with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            with strategy.scope():
                v = tfd.Variable([10.0, 20.0])
            for _ in range(3):
                own_gradients(strategy, optimizer, v, skip, reduce_first=skip)
            # The slots of all copies go on alike when the sum is left to the optimizer again.
            results.append(own_gradients(strategy, optimizer, v, skip=False))
    assert results[0] == results[1]
    assert results[1][0] == results[1][1]


@pytest.mark.distributed(workers=2)
def test_ranks_skip_the_aggregation(rank: int) -> None:
    optimizer = tfd.train.GradientDescentOptimizer(1.0)
    with tfd.MirroredStrategy() as strategy:
        with strategy.scope():
            v = tfd.Variable([10.0, 20.0])
        assert own_gradients(strategy, optimizer, v, skip=True) == [[[9.0, 18.0], [8.0, 16.0]][rank]]
    with tfd.experimental.CentralStorageStrategy() as strategy:
        with strategy.scope():
            v = tfd.Variable([10.0, 20.0], aggregation=tfd.VariableAggregation.SUM)
        with pytest.raises(NotImplementedError, match="skip_gradients_aggregation"):
            own_gradients(strategy, optimizer, v, skip=True)


@pytest.mark.parametrize("kind", ["AdamOptimizer", "MomentumOptimizer", "GradientDescentOptimizer"])
def test_one_copy_takes_what_was_reduced_by_hand_once(kind: str) -> None:
    """TensorFlow's optimizers refuse it there; one copy that takes a sum for each replica learns twice as fast."""
    results = []
    for skip in (False, True):
        optimizer = getattr(tfd.train, kind)(*([0.1, 0.9] if kind == "MomentumOptimizer" else [0.1]))
        with tfd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
            with strategy.scope():
                v = tfd.Variable([10.0, 20.0])
            for _ in range(3):
                own_gradients(strategy, optimizer, v, skip, reduce_first=skip)
            results.append(own_gradients(strategy, optimizer, v, skip=False))
            before = v.read_value().tolist()
            with pytest.raises(NotImplementedError, match="under central storage was given different gradients of"):
                own_gradients(strategy, optimizer, v, skip=True)
            assert v.read_value().tolist() == before
    assert results[0] == results[1]


def test_stop_gradients() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    y = x * x
    z = y * x
    assert gradients(z, [x, y], stop_gradients=[y]) == [9.0, 3.0]
    assert gradients(z, [x], stop_gradients=[x]) == [27.0]
    assert gradients(z, [x], stop_gradients=z) == [None]
    assert gradients(y, [x, y], stop_gradients=[y]) == [None, 1.0]
    assert gradients([y, y * x], [x], stop_gradients=[y]) == [9.0]
    method = tfd.AggregationMethod.EXPERIMENTAL_TREE
    assert gradients([y, y * x], [x], stop_gradients=[y], aggregation_method=method) == [9.0]
    assert gradients(y * 2, [x], stop_gradients=[y], unconnected_gradients="zero") == [0.0]
    assert gradients(z, [x, y]) == [27.0, 3.0], "nothing of it stays"
    a = torch.tensor(0.0, requires_grad=True)
    b = 2 * a
    assert gradients(a + b, [a, b], stop_gradients=[a, b]) == [1.0, 1.0]
    first, second = torch.split(x * torch.arange(4.0), 2)
    assert gradients(first.sum() + second.sum(), [x], stop_gradients=first) == [5.0]
    with pytest.raises(TypeError, match="must be tensors or variables, got a str"):
        gradients(z, [x], stop_gradients=["y"])


def test_wrapped_optimizer_without_gradients() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = tfd.train.Optimizer(torch.optim.SGD([parameter], lr=0.1))
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply_gradients([(None, parameter)])
    with pytest.raises(ValueError, match=r"1 variable\(s\) .* not in the groups of Optimizer, which wraps SGD"):
        optimizer.apply_gradients([(torch.ones(1), nn.Parameter(torch.ones(1)))])


def test_wrapped_optimizer_that_raises_gives_the_gradients_back() -> None:
    parameter, before = nn.Parameter(torch.ones(1)), torch.tensor([7.0])
    parameter.grad = before
    wrapped = torch.optim.SGD([parameter], lr=0.1)

    def fail(*_: Any) -> None:
        raise KeyError("hook")

    wrapped.register_step_pre_hook(fail)
    with pytest.raises(KeyError, match="hook"):
        tfd.train.Optimizer(wrapped).apply_gradients([(torch.ones(1), parameter)])
    assert parameter.grad is before
