"""TF-style optimizers: their rules against formulas written in numpy, and their interface."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy_rules import MADE, START, grad_of
from torch import nn

import tfstyle_dist as td
from tfstyle_dist import train

STEPS = 6
each_rule = pytest.mark.parametrize("name", list(MADE))


def sparse(dense: np.ndarray, rows: list[int]) -> torch.Tensor:
    """The rows of ``dense`` with the last one given as two halves, as an embedding used twice gives it."""
    index = torch.tensor([[*rows, rows[-1]]])
    values = torch.tensor(dense[[*rows, rows[-1]]])
    values[-2:] /= 2
    return torch.sparse_coo_tensor(index, values, dense.shape, check_invariants=True)


@each_rule
def test_rule(name: str) -> None:
    make, rule = MADE[name]
    optimizer, variable = make(), nn.Parameter(torch.tensor(START))
    expected, state = START.copy(), {}
    for step in range(1, STEPS + 1):
        optimizer.apply_gradients([(torch.tensor(grad_of(step)), variable)])
        expected = rule(expected, grad_of(step), state, step)
        np.testing.assert_allclose(variable.detach().cpu().numpy(), expected, rtol=1e-12, atol=1e-14)
    if name == "ftrl_regularised":
        assert (expected == 0).any(), "the threshold l1 was never met"


@each_rule
def test_rule_on_sparse_rows(name: str) -> None:
    """Only the rows with a gradient change; Adam decays the moments of all rows, as TensorFlow does."""
    make, rule = MADE[name]
    optimizer, variable = make(), nn.Parameter(torch.tensor(START))
    expected, states = START.copy(), [{} for _ in START]
    for step, rows in enumerate([[0], [0, 2], [2], [0, 2]], start=1):
        grad = grad_of(step)
        grad[[r for r in range(len(START)) if r not in rows]] = 0.0
        optimizer.apply_gradients([(sparse(grad, rows), variable)])
        for row in range(len(START)) if name == "adam" else rows:
            expected[row] = rule(expected[row], grad[row], states[row], step)
        np.testing.assert_allclose(variable.detach().cpu().numpy(), expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(variable.detach().cpu().numpy()[1], START[1])


@each_rule
def test_state_dict_round_trip(name: str) -> None:
    make = MADE[name][0]
    optimizer, variable = make(), nn.Parameter(torch.tensor(START))
    for step in range(3):
        optimizer.apply_gradients([(torch.tensor(grad_of(step)), variable)])
    saved, twin = copy.deepcopy(optimizer.state_dict()), nn.Parameter(variable.detach().clone())
    other = make()
    other.load_state_dict(saved, [twin])
    for step in range(3, 6):
        for o, v in ((optimizer, variable), (other, twin)):
            o.apply_gradients([(torch.tensor(grad_of(step)), v)])
    assert torch.equal(variable, twin)
    assert other.get_slot_names() == optimizer.get_slot_names()
    for slot in optimizer.get_slot_names():
        assert torch.equal(other.get_slot(twin, slot), optimizer.get_slot(variable, slot))


def test_state_of_other_length_is_refused() -> None:
    optimizer, variable = train.MomentumOptimizer(0.1, 0.9), nn.Parameter(torch.ones(2))
    optimizer.apply_gradients([(torch.ones(2), variable)])
    with pytest.raises(ValueError, match="1 variables, but 2"):
        optimizer.load_state_dict(optimizer.state_dict(), [variable, nn.Parameter(torch.ones(2))])


def test_learning_rate_may_be_a_function_or_a_tensor() -> None:
    rates = iter([0.5, 0.25])
    variable = nn.Parameter(torch.zeros(1))
    optimizer = train.GradientDescentOptimizer(lambda: next(rates))
    for _ in range(2):
        optimizer.apply_gradients([(torch.ones(1), variable)])
    train.GradientDescentOptimizer(torch.tensor(0.125)).apply_gradients([(torch.ones(1), variable)])
    assert variable.item() == -0.875


@pytest.mark.parametrize("as_function", [False, True])
def test_minimize_without_var_list(as_function: bool) -> None:
    first, second, frozen = (nn.Parameter(torch.tensor(float(k))) for k in (1, 2, 3))
    frozen.requires_grad_(False)
    unused = nn.Parameter(torch.tensor(4.0))

    def loss() -> torch.Tensor:
        return first * second * frozen

    step = td.Variable(0, dtype=torch.int64)
    train.GradientDescentOptimizer(0.1).minimize(loss if as_function else loss(), global_step=step)
    assert first.item() == pytest.approx(1 - 0.1 * 6)
    assert second.item() == pytest.approx(2 - 0.1 * 3)
    assert (frozen.item(), unused.item(), int(step)) == (3.0, 4.0, 1)


def test_compute_gradients() -> None:
    first, second = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(5.0))
    optimizer = train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(first**2)
    assert [(g.item(), v is first) for g, v in pairs] == [(4.0, True)]
    pairs = optimizer.compute_gradients(first**2, [second, first], grad_loss=torch.tensor(3.0))
    assert pairs[0] == (None, second)
    assert (pairs[1][0].item(), pairs[1][1] is first) == (12.0, True)
    pairs = optimizer.compute_gradients([first**2, first * second], [first], aggregation_method=2)
    assert pairs[0][0].item() == 9.0
    assert first.grad is None


def test_errors() -> None:
    optimizer, variable = train.GradientDescentOptimizer(0.1), nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="no trainable variable"):
        optimizer.compute_gradients(torch.ones(()))
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply_gradients([])
    with pytest.raises(ValueError, match="all are None"):
        optimizer.apply_gradients([(None, variable)])
    with pytest.raises(ValueError, match="must be positive"):
        train.AdagradOptimizer(0.1, initial_accumulator_value=0.0)
    for wrong in (
        {"l1_regularization_strength": -1.0},
        {"l2_regularization_strength": -1.0},
        {"initial_accumulator_value": -1.0},
        {"l2_shrinkage_regularization_strength": -1.0},
        {"learning_rate_power": 0.5},
    ):
        with pytest.raises(ValueError, match="needs to be"):
            train.FtrlOptimizer(0.1, **wrong)
    with pytest.raises(TypeError, match=r"takes a torch\.optim optimizer"):
        train.Optimizer(optimizer)  # type: ignore[arg-type]


# ---- under a strategy ---------------------------------------------------------------------------------

both_process_models = pytest.mark.parametrize(
    "process_model", ["in_process", pytest.param("ranks", marks=pytest.mark.distributed(workers=2))]
)


@pytest.fixture
def strategy(request: pytest.FixtureRequest) -> Iterator[td.Strategy]:
    ranks = request.node.get_closest_marker("distributed") is not None
    with td.MirroredStrategy() if ranks else td.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        yield made


def replica() -> int:
    context: Any = td.get_replica_context()
    return context.replica_id_in_sync_group


def values(strategy: td.Strategy, variable: torch.Tensor) -> list[Any]:
    """The variable on this worker's replicas."""
    got = strategy.run(lambda: (variable + 0).detach())
    return [value.tolist() for value in strategy.experimental_local_results(got)]


def parameter(strategy: td.Strategy, value: Any) -> nn.Parameter:
    with strategy.scope():
        module = nn.Module()
        module.w = nn.Parameter(torch.tensor(value, dtype=torch.float64))
    return module.w


@both_process_models
@each_rule
def test_gradients_are_summed_over_the_replicas(strategy: td.Strategy, process_model: str, name: str) -> None:
    make, rule = MADE[name]
    optimizer, variable = make(), parameter(strategy, START)
    expected, state = START.copy(), {}

    def step(k: int) -> None:
        share = 0.25 if replica() == 0 else 0.75
        optimizer.apply_gradients([(torch.tensor(grad_of(k)) * share, variable)])

    for k in range(1, 4):
        strategy.run(step, args=(k,))
        expected = rule(expected, grad_of(k), state, k)
    for value in values(strategy, variable):
        np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-14)


@both_process_models
def test_gradient_on_one_replica_and_on_none(strategy: td.Strategy, process_model: str) -> None:
    first, second, third = (parameter(strategy, [float(k)]) for k in (1, 2, 3))
    optimizer = train.MomentumOptimizer(0.5, 0.9)

    def step() -> None:
        one = torch.ones(1, dtype=torch.float64)
        optimizer.apply_gradients([(one, first), (one if replica() == 1 else None, second), (None, third)])

    strategy.run(step)
    assert values(strategy, first)[0] == [0.0]
    assert values(strategy, second)[0] == [1.5]
    assert values(strategy, third)[0] == [3.0]
    assert optimizer.get_slot(third, "momentum") is None


@both_process_models
def test_minimize_leaves_grad_alone_and_counts_steps(strategy: td.Strategy, process_model: str) -> None:
    variable = parameter(strategy, [3.0])
    with strategy.scope():
        counter = td.Variable(0, dtype=torch.int64, aggregation=td.VariableAggregation.ONLY_FIRST_REPLICA)
    optimizer = train.GradientDescentOptimizer(0.1)

    def step() -> bool:
        optimizer.minimize((variable * (1.0 + replica())).sum(), global_step=counter)
        return variable.grad is None

    for _ in range(2):
        assert all(strategy.experimental_local_results(strategy.run(step)))
    for value in values(strategy, variable):
        assert value == pytest.approx([3.0 - 2 * 0.1 * (1 + 2)])
    assert int(counter) == 2


@both_process_models
def test_applying_a_reduced_gradient_raises(strategy: td.Strategy, process_model: str) -> None:
    """``backward()`` has taken the mean already; the sum of means would be too large."""
    variable = parameter(strategy, [3.0])
    optimizer = train.GradientDescentOptimizer(0.1)

    def step() -> None:
        variable.grad = None
        (variable * (1.0 + replica())).sum().backward()
        optimizer.apply_gradients([(variable.grad, variable)])

    with pytest.raises(RuntimeError, match="already reduced"):
        strategy.run(step)
    assert values(strategy, variable)[0] == [3.0]
    strategy.set_gradient_policy([variable], reduce_at="apply")
    strategy.run(step)
    for value in values(strategy, variable):
        assert value == pytest.approx([3.0 - 0.1 * (1 + 2)])


@both_process_models
@pytest.mark.parametrize("wrapped", [True, False])
def test_claimed_parameters_stay_local_in_backward(strategy: td.Strategy, process_model: str, wrapped: bool) -> None:
    """``train.Optimizer`` sums what a torch optimizer then applies."""
    variable = parameter(strategy, [3.0])
    inner = torch.optim.SGD([variable], lr=0.1)
    optimizer = train.Optimizer(inner) if wrapped else train.GradientDescentOptimizer(0.1)

    def step() -> float:
        optimizer.minimize((variable * (1.0 + replica())).sum())
        variable.grad = None
        (variable * (1.0 + replica())).sum().backward()
        return float(variable.grad)

    local = strategy.experimental_local_results(strategy.run(step))
    assert [*local] == ([1.0, 2.0] if process_model == "in_process" else [1.0 + strategy.worker.group.rank])
    for value in values(strategy, variable):
        assert value == pytest.approx([3.0 - 0.1 * (1 + 2)])


@both_process_models
def test_sparse_gradients_are_summed(strategy: td.Strategy, process_model: str) -> None:
    with strategy.scope():
        table = nn.Embedding(4, 2, sparse=True).double()
        nn.init.zeros_(table.weight)
    optimizer = train.AdagradOptimizer(0.1)
    rows = torch.tensor([[0, 1, 1], [1, 3, 3]])

    def step() -> None:
        optimizer.minimize(table(rows[replica()]).sum(), var_list=[table.weight])

    strategy.run(step)
    grad = np.array([[1.0], [3.0], [0.0], [2.0]]) * np.ones((4, 2))
    for value in values(strategy, table.weight):
        np.testing.assert_allclose(value, -0.1 * grad / np.sqrt(0.1 + grad**2), rtol=1e-12)


@both_process_models
def test_replicas_that_list_other_variables_raise(strategy: td.Strategy, process_model: str) -> None:
    first, second = parameter(strategy, [1.0]), parameter(strategy, [1.0, 2.0])
    optimizer = train.GradientDescentOptimizer(0.1)

    def step() -> None:
        variable = first if replica() == 0 else second
        optimizer.apply_gradients([(torch.ones_like(variable), variable)])

    wording = {"in_process": "replica 1 lists other variables", "ranks": "make different calls"}
    with pytest.raises(RuntimeError, match=wording[process_model]):
        strategy.run(step)


@both_process_models
def test_variable_is_trained_like_a_parameter(strategy: td.Strategy, process_model: str) -> None:
    with strategy.scope():
        variable = td.Variable([1.0, 2.0], aggregation=td.VariableAggregation.MEAN)
    optimizer = train.GradientDescentOptimizer(0.5)
    strategy.run(lambda: optimizer.minimize((variable**2).sum() * 0.25))
    for value in values(strategy, variable):
        assert value == [0.5, 1.0]


def test_copies_that_have_drifted_go_on_from_where_they_are() -> None:
    """What is equal stays equal bit for bit, whatever the rounding; what differs gets the same step."""
    start = torch.rand(100, generator=torch.Generator().manual_seed(0), device="cpu")
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            variable = td.Variable(start)
        moved = torch.cat([start[:1] + 5, start[1:]])
        variable.assign(td.values.PerReplica((start, moved)))
        optimizer = train.GradientDescentOptimizer(0.3)
        strategy.run(lambda: optimizer.apply_gradients([(torch.full((100,), 0.7), variable)]))
        first, second = (copy.cpu() for copy in strategy.experimental_local_results(variable))
        assert torch.equal(first[1:], second[1:])
        assert first.tolist() == pytest.approx((start - 0.42).tolist(), abs=1e-6)
        assert second.tolist() == pytest.approx((moved - 0.42).tolist(), abs=1e-6)
