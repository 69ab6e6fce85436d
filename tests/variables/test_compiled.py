"""What ``torch.compile`` makes of functions that read and write variables is what Python makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tfstyle_dist as tfd

pytestmark = pytest.mark.cpu_only("torch.compile does not see the default device of these suites; tests/gpu does")
Compiled = Callable[..., torch.Tensor]
REPLICAS = 2


@pytest.fixture
def strategy() -> Iterator[tfd.Strategy]:
    torch.compiler.reset()
    with tfd.MirroredStrategy([f"cpu:{replica}" for replica in range(REPLICAS)]) as made:
        yield made


def _multiplies(x: torch.Tensor, variable: Any) -> torch.Tensor:
    return (x * variable).sum() + torch.nn.functional.linear(x, variable)


def _looks(x: torch.Tensor, variable: Any) -> torch.Tensor:
    return variable.sum() + variable[0] + variable.value().sum() + variable.shape[0] + x.sum()


def _data(x: torch.Tensor, variable: Any) -> torch.Tensor:
    return (variable.data * x).sum()


def _writes_data(x: torch.Tensor, variable: Any) -> torch.Tensor:
    variable.data.mul_(2.0)
    return (variable * x).sum()


def _adds_in_place(x: torch.Tensor, variable: Any) -> torch.Tensor:
    variable.add_(x)
    return variable.sum()


def _assigns(x: torch.Tensor, variable: Any) -> torch.Tensor:
    variable.assign_add(x)
    return (variable * x).sum()


@pytest.mark.parametrize(
    "function", [_multiplies, _looks, _data, _writes_data, _adds_in_place, _assigns], ids=lambda f: f.__name__[1:]
)
def test_reads_and_writes(strategy: tfd.Strategy, function: Any) -> None:
    def outcome(called: Compiled) -> list[Any]:
        with strategy.scope():
            variable = tfd.Variable(
                torch.ones(3),
                trainable=False,
                synchronization=tfd.VariableSynchronization.ON_READ,
                aggregation=tfd.VariableAggregation.MEAN,
            )

        def begin() -> None:
            replica = tfd.get_replica_context().replica_id_in_sync_group
            variable.assign(torch.full((3,), 1.0 + replica))

        def step() -> torch.Tensor:
            replica = tfd.get_replica_context().replica_id_in_sync_group
            return called(torch.full((3,), 2.0 + replica), variable).detach()

        strategy.run(begin)
        found = [strategy.experimental_local_results(strategy.run(step)) for _ in range(2)]
        outside = called(torch.ones(3), variable).detach()
        found += [[outside], strategy.experimental_local_results(strategy.run(step))]
        copies = [copy.detach().clone() for copy in strategy.experimental_local_results(variable)]
        return [value.tolist() for values in [*found, copies] for value in values]

    expected = outcome(function)
    assert outcome(torch.compile(function, backend="aot_eager")) == expected
    assert expected[0] != expected[1]  # each replica has its own


EXPRESSIONS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "in the second place": lambda x, v: (x * v).sum() + torch.nn.functional.linear(x, v),
    "in the first place": lambda x, v: (v * x).sum() * 2 + (v - x).exp().sum(),
    "with numbers": lambda x, v: (1 - v).sum() * 2 + (2**v).sum() + (v**2).sum() - (-v).sum(),
    "two variables": lambda x, v: (v * v).sum() * 2 + torch.stack([v, v]).mean(0).sum(),
    "comparisons": lambda x, v: torch.where(v > 0, v, x).sum() * 2 + (v > x).sum() + v.max(),
    "products": lambda x, v: (x @ v).exp() + (v @ x).exp() + (v.t() @ x) * 2,
    "parts": lambda x, v: (v[0] * v[1] + x).sum() * 2 + (v.view(3) * x).sum(),
    "data": lambda x, v: (x * v.data).sum() * 2 + (v.detach() * x).sum(),
    "shape and device": lambda x, v: (x.to(v.device) * v.numel()).sum() * 2 + v.shape[0],
    "in place": lambda x, v: (v.add_(x) * x).sum() * 2 + x.sum(),
    "by an operator": lambda x, v: (v.__iadd__(x) + x).sum() + x.clone().__iadd__(v).sum() * 2,
    "through an alias": lambda x, v: (v.detach().add_(x) * x).sum() * 2,
    "several times": lambda x, v: v.mul_(2).sum() + v.assign_add(x).sum() * 2,
}


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS.keys())
@pytest.mark.parametrize("in_step", [True, False], ids=["in a step", "outside"])
@pytest.mark.parametrize("on_read", [True, False], ids=["on read", "on write"])
def test_what_is_compiled_before_it_was_ever_run(
    strategy: tfd.Strategy, expression: Compiled, in_step: bool, on_read: bool
) -> None:
    def outcome(called: Compiled) -> list[Any]:
        with strategy.scope():
            variable = tfd.Variable(
                torch.full((3,), 2.0),
                trainable=False,
                synchronization=getattr(tfd.VariableSynchronization, "ON_READ" if on_read else "ON_WRITE"),
                aggregation=tfd.VariableAggregation.MEAN,
            )
        x = torch.full((3,), 3.0)
        values = [strategy.run(called, (x, variable)) if in_step else called(x, variable) for _ in range(2)]
        values.append(strategy.run(variable.value))
        return [part.tolist() for value in values for part in strategy.experimental_local_results(value)]

    compiled = outcome(torch.compile(expression, backend="eager"))
    assert compiled == outcome(expression)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at all
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_step(strategy: tfd.Strategy, by_hand: bool) -> None:
    def outcome(compile: Callable[[Compiled], Compiled]) -> list[float]:
        with strategy.scope():
            weight = tfd.Variable(torch.ones(3))
            steps = tfd.Variable(0, trainable=False, aggregation=tfd.VariableAggregation.ONLY_FIRST_REPLICA)
            optimizer: Any = torch.optim.SGD([weight], lr=0.1) if by_hand else tfd.train.MomentumOptimizer(0.1, 0.9)

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return ((x * weight).sum(-1) - 2.0).square().mean()

        def minimize(x: torch.Tensor) -> torch.Tensor:
            loss = loss_of(x)
            optimizer.minimize(loss, var_list=[weight])
            steps.assign_add(1)
            return loss.detach()

        compiled = compile(loss_of if by_hand else minimize)

        def step() -> torch.Tensor:
            x = torch.arange(6.0).reshape(2, 3) / (3 + tfd.get_replica_context().replica_id_in_sync_group)
            if not by_hand:
                return compiled(x)
            optimizer.zero_grad()
            loss = compiled(x)
            loss.backward()
            optimizer.step()
            steps.assign_add(1)
            return loss.detach()

        losses = [loss for _ in range(3) for loss in strategy.experimental_local_results(strategy.run(step))]
        return [*map(float, losses), *weight.value().tolist(), int(steps)]

    expected = outcome(lambda function: function)
    assert outcome(lambda function: torch.compile(function, backend="aot_eager")) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] == 3
