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
