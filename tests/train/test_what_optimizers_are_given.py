"""Gradients, variables and losses of another kind or shape: refused before anything is updated, or taken as meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError

FORMS: dict[str, Callable[[], td.Strategy]] = {
    "one": lambda: td.OneDeviceStrategy("cpu"),
    "mirrored": lambda: td.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


@pytest.fixture(params=FORMS)
def strategy(request: pytest.FixtureRequest) -> Iterator[td.Strategy]:
    with FORMS[request.param]() as made, made.scope():
        yield made


def applied(strategy: td.Strategy, pairs: Callable[[], Any], **options: Any) -> None:
    optimizer = td.train.GradientDescentOptimizer(0.5)
    strategy.run(lambda: optimizer.apply_gradients(pairs(), **options))


@pytest.mark.parametrize("shape", [(), (1,), (1, 2), (2, 2), (3,)])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_is_not_broadcast(strategy: td.Strategy, shape: tuple[int, ...], sparse: bool) -> None:
    v, grad = td.Variable([1.0, 2.0], name="v"), torch.ones(shape)
    grad = grad.to_sparse() if sparse else grad
    with pytest.raises(InvalidArgumentError, match=r"gradient of 'v' has the shape .*, the variable has \(2,\)"):
        applied(strategy, lambda: [(grad, v)])
    assert v.value().tolist() == [1.0, 2.0]


def test_rows_of_another_length(strategy: td.Strategy) -> None:
    v = td.Variable([[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(InvalidArgumentError, match=r"values of shape \(1, 3\), .* Give values of shape \(1, 2\)"):
        applied(strategy, lambda: [(td.IndexedSlices(torch.ones(1, 3), [0]), v)])
    for row in (7, -1):
        with pytest.raises(InvalidArgumentError, match=r"do not fit a variable of shape \(2, 2\): .*counted from 0"):
            applied(strategy, lambda row=row: [(td.IndexedSlices(torch.ones(1, 2), [row]), v)])  # type: ignore[misc]
    with pytest.raises(InvalidArgumentError, match=r"has the shape \(3, 2\), the variable has \(2, 2\)"):
        applied(strategy, lambda: [(td.IndexedSlices(torch.ones(1, 2), [0], (3, 2)), v)])
    applied(strategy, lambda: [(td.IndexedSlices(torch.ones(1, 2), [1]), v)])
    applied(strategy, lambda: [(td.IndexedSlices(torch.zeros(4, 2), [[0, 1], [1, 0]]), v)])
    applied(strategy, lambda: [(td.IndexedSlices([], []), v)])
    replicas = strategy.num_replicas_in_sync
    assert v.value().tolist() == [[1.0, 2.0], [3.0 - replicas / 2, 4.0 - replicas / 2]]


def test_a_variable_comes_second(strategy: td.Strategy) -> None:
    v = td.Variable([1.0, 2.0])
    with pytest.raises(
        TypeError, match=r"gradient and its variable, in this order, got \(.*, Tensor of shape \(2,\)\)"
    ):
        applied(strategy, lambda: [(v, torch.ones(2))])
    for wrong in ([torch.ones(2)], [(torch.ones(2),)], [(torch.ones(2), v, 1)], [(torch.ones(2), "v")]):
        with pytest.raises(TypeError, match="takes pairs of a gradient and its variable"):
            applied(strategy, lambda wrong=wrong: wrong)  # type: ignore[misc]
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    td.train.GradientDescentOptimizer(0.5).apply_gradients([(torch.ones(2), frozen)])
    assert frozen.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("grad", [[1.0, 2.0], (1, 2), np.array([1.0, 2.0]), torch.tensor([1, 2])])
def test_numbers_are_gradients(strategy: td.Strategy, grad: Any) -> None:
    v, w = td.Variable([0.0, 0.0]), td.Variable(0.0)
    applied(strategy, lambda: [(grad, v), (1.0, w)])
    replicas = strategy.num_replicas_in_sync
    assert (v.value().tolist(), w.value().tolist()) == ([-0.5 * replicas, -1.0 * replicas], -0.5 * replicas)


def test_what_is_no_gradient(strategy: td.Strategy) -> None:
    v = td.Variable([1.0, 2.0], name="v")
    with pytest.raises(TypeError, match=r"gradient of 'v' must be a tensor, .* got 'x' \(str\)"):
        applied(strategy, lambda: [("x", v)])
    with pytest.raises(TypeError, match=r"is torch.complex64, the variable torch.float32.*gradient.real"):
        applied(strategy, lambda: [(torch.ones(2, dtype=torch.complex64), v)])
    with pytest.raises(TypeError, match=r"gradient of 'v' is torch\.bool, which has no sum"):
        applied(strategy, lambda: [(torch.ones(2, dtype=torch.bool), v)])
    with pytest.raises(TypeError, match=r"global_step must be a Variable, got 5 \(int\)"):
        applied(strategy, lambda: [(torch.ones(2), v)], global_step=5)
    assert v.value().tolist() == [1.0, 2.0]


def test_gradients_of_replicas_given_outside_of_run() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, strategy.scope():
        v = td.Variable([1.0, 2.0])
        optimizer = td.train.GradientDescentOptimizer(0.5)
        of = strategy.experimental_distribute_values_from_function
        ones = lambda sizes: of(lambda context: torch.ones(sizes[context.replica_id_in_sync_group]))  # noqa: E731
        optimizer.apply_gradients([(ones([2, 2]), v)])
        assert v.value().tolist() == [0.0, 1.0]
        with pytest.raises(InvalidArgumentError, match=r"has the shape \(1,\), the variable has \(2,\)"):
            optimizer.apply_gradients([(ones([2, 1]), v)])


def test_var_list_is_a_variable_or_a_nest_of_them(strategy: td.Strategy) -> None:
    v, w = td.Variable([2.0]), td.Variable(2.0)
    optimizer: Any = td.train.GradientDescentOptimizer(0.125)
    given: list[Any] = [v, [v, [w]], {"v": v, "w": w}, (x for x in [v])]
    for var_list in given[:3]:
        strategy.run(lambda var_list=var_list: optimizer.minimize(lambda: (v * v).sum() + w, var_list=var_list))
    one = nn.ParameterList([nn.Parameter(torch.ones(1))])
    assert len(optimizer.compute_gradients(lambda: one[0].sum(), var_list=one)) == 1
    rate = 1 - 0.25 * strategy.num_replicas_in_sync
    assert (v.value().item(), w.value().item()) == (2.0 * rate**3, 2.0 - 0.25 * strategy.num_replicas_in_sync)
    pairs = td.train.GradientDescentOptimizer(0.1).compute_gradients(v * v, var_list=given[3])
    assert [variable for _, variable in pairs] == [v]
    for wrong in (nn.Linear(1, 1), lambda: [v], "v", 5):
        with pytest.raises(TypeError, match=f"must be a list of parameters or variables, got a {type(wrong).__name__}"):
            optimizer.minimize(lambda: (v * v).sum(), var_list=wrong)


@pytest.mark.parametrize("loss", [None, 1.0, "x", [None]])
def test_a_loss_is_a_tensor(strategy: td.Strategy, loss: Any) -> None:
    v, optimizer = td.Variable([2.0]), td.train.GradientDescentOptimizer(0.5)
    for var_list in (None, [v]):
        with pytest.raises(TypeError, match=r"The loss must be a tensor, .* got"):
            strategy.run(lambda var_list=var_list: optimizer.minimize(lambda: loss, var_list=var_list))
    with pytest.raises(TypeError, match=r"ys must be tensors .* got 1.0 \(float\)"):
        td.train.gradients(1.0, [v])
    with pytest.raises(ValueError, match=r"must be one of \['none', 'zero'\], got 'zeros'"):
        td.train.gradients(v * v, [v], unconnected_gradients="zeros")


@pytest.mark.parametrize("rate", [None, lambda: None, torch.ones(2), "fast"])
def test_a_rate_is_a_number(strategy: td.Strategy, rate: Any) -> None:
    v, optimizer = td.Variable([2.0]), td.train.AdamOptimizer(rate)
    with pytest.raises(
        TypeError, match=r"A rate of an optimizer must be a number, .* Write e\.g\. learning_rate=0\.01"
    ):
        strategy.run(lambda: optimizer.apply_gradients([(torch.ones(1), v)]))
    assert v.value().item() == 2.0


@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
@pytest.mark.parametrize("optimizer", ["GradientDescentOptimizer", "AdamOptimizer"])
def test_a_gradient_that_a_variable_has_collected(optimizer: str, aggregation: str) -> None:
    """Each replica gives what it has in the variable, and the sum is applied, as in TensorFlow 2.21."""
    read = td.VariableSynchronization.ON_READ
    with FORMS["mirrored"]() as strategy:
        with strategy.scope():
            plain, other = td.Variable([2.0, 3.0]), td.Variable([2.0, 3.0])
            total = td.Variable([0.0, 0.0], synchronization=read, aggregation=td.VariableAggregation[aggregation])
        first, second = (getattr(td.train, optimizer)(0.5) for _ in range(2))

        def step() -> None:
            own = torch.tensor([1.0, -1.0]) * (1.0 + td.get_replica_context().replica_id_in_sync_group)
            total.assign_add(own, read_value=False)
            first.apply_gradients([(own, plain)])
            second.apply_gradients([(total, other)])

        strategy.run(step)
        assert other.read_value().tolist() == plain.read_value().tolist()
        parts = strategy.experimental_local_results(total)
        assert [part.tolist() for part in parts] == [[1.0, -1.0], [2.0, -2.0]], "it keeps what it has"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, name: Any) -> torch.Tensor:
        ctx.variable = name  # as torch calls what it adds gradients to
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * 2, None


@pytest.mark.parametrize("name", [5, None, torch.ones(2)], ids=["number", "none", "tensor"])
def test_a_function_of_the_program_may_keep_something_as_variable(name: Any) -> None:
    variable = td.Variable(torch.ones(2))
    pairs = td.train.GradientDescentOptimizer(0.1).compute_gradients(Doubled.apply(variable, name).sum())
    assert [(gradient.tolist(), of is variable) for gradient, of in pairs] == [([2.0, 2.0], True)]
