"""What a user gets wrong with variables and optimizers, and what the error says about it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.values import PerReplica

# ---- variables ---------------------------------------------------------------------------------------------


def variable(strategy: Any, value: Any = 0.0, **options: Any) -> Any:
    with strategy.scope():
        return td.Variable(value, name="v", **options)


def test_assigning_what_does_not_fit(two: Any) -> None:
    v = variable(two, torch.zeros(2))
    with pytest.raises(
        InvalidArgumentError, match=r"Variable 'v' has shape \(2,\), but the assigned value has shape \(3,\)"
    ):
        v.assign(torch.ones(3))
    with pytest.raises(
        InvalidArgumentError, match=r"dtype torch.float32, but the assigned tensor has torch.int64; write"
    ):
        v.assign(torch.ones(2, dtype=torch.int64))
    with pytest.raises(InvalidArgumentError, match="Variable 'v' was assigned 'two', which is no tensor"):
        v.assign("two")
    assert v.tolist() == [0.0, 0.0]


def test_reading_an_unaggregated_variable_across_replicas(two: Any) -> None:
    v = variable(two, synchronization=td.VariableSynchronization.ON_READ)
    with pytest.raises(
        ValueError, match=r"'v' has aggregation NONE: its copies cannot be read.*Read it inside strategy.run"
    ):
        v.value()


def test_a_number_under_sum(two: Any) -> None:
    v = variable(two, aggregation=td.VariableAggregation.SUM)
    with pytest.raises(
        ValueError,
        match=r"1.0 cannot be reduced: .*Pass a tensor, e.g. variable.assign\(torch.tensor\(1.0\)\)",
    ):
        two.run(lambda: v.assign(1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"synchronization": "ON_READ"}, "must be a VariableSynchronization, got 'ON_READ'"),
        ({"aggregation": "SUM"}, "must be a VariableAggregation, got 'SUM'"),
        (
            {"synchronization": td.VariableSynchronization.NONE},
            "NONE is not supported by MirroredStrategy.*Use AUTO",
        ),
        (
            {"aggregation": td.VariableAggregation.MEAN, "value": 3},
            "MEAN needs a floating point variable, got dtype",
        ),
        ({"value": None}, "needs an initial_value: a number"),
        ({"value": "text"}, "initial_value 'text' is not a number"),
        ({"value": PerReplica((1.0, 2.0))}, "must be the same on all replicas, got a PerReplica"),
    ],
)
def test_variable_options(two: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        variable(two, **options)


def test_a_variable_of_another_strategy(two: Any) -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as other:
        v = variable(other, aggregation=td.VariableAggregation.MEAN)
        with pytest.raises(RuntimeError, match=r"Mixing different tf.distribute strategies: assigning variable 'v'"):
            two.run(lambda: v.assign(1.0))


# ---- optimizers --------------------------------------------------------------------------------------------


def test_parameters_of_another_strategy(two: Any) -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as other:
        with other.scope():
            model = torch.nn.Linear(2, 1)
        with pytest.raises(
            RuntimeError,
            match=r"Mixing different .*: '(weight|bias)' already belongs to .*a module of its own",
        ):
            two.experimental_adopt(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=r"Mixing different .*: SGD holds parameters of"):
            two.run(optimizer.step)
        with two.scope():
            own = torch.nn.Linear(2, 1)
        both = torch.optim.SGD([*model.parameters(), *own.parameters()], lr=0.1)
        with pytest.raises(
            RuntimeError, match=r"SGD holds parameters of several strategies.*Use one optimizer for each"
        ):
            both.step()


def test_parameters_of_no_strategy(two: Any) -> None:
    plain = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(
        RuntimeError, match=r"none of its parameters belongs to the strategy.*experimental_adopt\(module\)"
    ):
        two.run(plain.step)
    with two.scope():
        own = torch.nn.Linear(2, 1)
    mixed = torch.optim.SGD([*own.parameters(), *torch.nn.Linear(2, 1).parameters()], lr=0.1)
    with pytest.raises(RuntimeError, match=r"mixes parameters of .* that belong to no strategy.*shape \(1, 2\)"):
        two.run(mixed.step)


def test_lbfgs(two: Any) -> None:
    with two.scope():
        model = torch.nn.Linear(2, 1)
    with pytest.raises(RuntimeError, match="LBFGS calls its closure a different number of times"):
        two.run(lambda: torch.optim.LBFGS(model.parameters()).step(lambda: torch.zeros(())))


@pytest.mark.parametrize("kind", [td.MirroredStrategy, td.experimental.CentralStorageStrategy])
def test_lbfgs_outside_of_run(kind: Any) -> None:
    """One process makes one step there, on the whole batch, and all replicas find what it wrote."""
    rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))

    def train(model: torch.nn.Module, after: Any = None) -> list[torch.Tensor]:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(rows) - rows.sum(1, keepdim=True).sin()).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
            assert after is None or after()
        return [parameter.detach().clone() for parameter in model.parameters()]

    with kind(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        alone = copy.deepcopy(model)

        def same_everywhere() -> bool:
            found = strategy.experimental_local_results(strategy.run(lambda: model(rows[:4]).detach().clone()))
            return all(torch.equal(own, found[0]) for own in found)

        found = train(model, same_everywhere)
    assert all(map(torch.equal, found, train(alone)))


@pytest.mark.parametrize("mask_of", ["the module", "the optimizer"])
def test_an_optimizer_of_which_each_replica_cuts_the_parameters(mask_of: str) -> None:
    """As splats are pruned: the second replica finds the one optimizer's state cut, and torch's error says no cause."""
    with td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]) as central:
        with central.scope():
            model = torch.nn.ParameterDict({"points": torch.nn.Parameter(torch.ones(6, 2))})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step() -> None:
            model["points"].square().sum().backward()
            optimizer.step()
            group = optimizer.param_groups[0]
            old = group["params"][0]
            keep = torch.arange(len(model["points"] if mask_of == "the module" else old)) % 2 == 0
            state = {k: v[keep] if v.dim() else v for k, v in optimizer.state.pop(old).items()}
            model["points"] = torch.nn.Parameter(model["points"].detach()[: len(old)][keep])
            group["params"][0], optimizer.state[model["points"]] = model["points"], state

        with pytest.raises((IndexError, RuntimeError)) as caught:
            central.run(step)
        said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert caught.type is (IndexError if mask_of == "the module" else RuntimeError)
        assert (
            said.count("there is one optimizer for all replicas: the others find its parameters, and its state,") == 1
        )
        assert "Do it after strategy.run(...), or use MirroredStrategy" in said


def test_a_group_that_each_replica_adds_is_added_once() -> None:
    def trained(strategy: td.Strategy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.5, momentum=0.9)

        def step(adds: bool) -> None:
            if adds:
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(3):
            strategy.run(step, args=(number == 1,))
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
        with pytest.raises(ValueError, match="more than one parameter group"):
            strategy.run(step, args=(True,))
        return [p.detach().clone() for p in model.parameters()]

    with td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]) as central, td.OneDeviceStrategy("cpu:0") as one:
        for ours, alone in zip(trained(central), trained(one), strict=True):
            assert ours.equal(alone)


def test_settings_that_a_step_may_change() -> None:
    """The same value given by every replica, by one replica alone, or in merge_call: the optimizer has it once."""
    with td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]) as central:
        with central.scope():
            model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

        def give(rate: float) -> None:
            optimizer.param_groups[0]["lr"] = rate

        def step(rate: float) -> None:
            context = td.get_replica_context()
            give(rate)
            model(torch.ones(1, 2)).sum().backward()
            give(rate / 2)
            context.all_reduce("SUM", torch.ones(()))
            give(rate)
            optimizer.step()
            optimizer.zero_grad()
            if context.replica_id_in_sync_group == 0:
                optimizer.param_groups[0]["momentum"] *= 0.5
            context.merge_call(lambda strategy: give(rate * 10))

        for number, rate in enumerate((0.1, 0.2, 0.3)):
            central.run(step, args=(rate,))
            assert optimizer.param_groups[0]["lr"] == rate * 10
            assert optimizer.param_groups[0]["momentum"] == 0.9 * 0.5 ** (number + 1)


def test_adopting_what_is_no_module(two: Any) -> None:
    with pytest.raises(
        TypeError, match=r"experimental_adopt takes a torch.nn.Module or an object with attributes of its own, got list"
    ):
        two.experimental_adopt([torch.nn.Linear(1, 1)])
    with pytest.raises(ValueError, match=r"Parameter weight has no shape yet \(lazy module\). Run the module once"):
        two.experimental_adopt(torch.nn.LazyLinear(2))


def test_gradient_policy(two: Any) -> None:
    with two.scope():
        model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"reduce_at must be one of .*got 'never'"):
        two.set_gradient_policy(reduce_at="never")
    with pytest.raises(ValueError, match="must be a valid ReduceOp"):
        two.set_gradient_policy(model.parameters(), scale="MAX")
    with pytest.raises(ValueError, match=r"shape \(3,\) does not belong to .*build its module in scope\(\)"):
        two.set_gradient_policy([torch.nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_gradient_policy_of_what_is_no_list_of_parameters(devices: list[str]) -> None:
    with td.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(2, 1)
        given: Any
        for given, message in (
            (model, r"got one Linear. Write parameters=module.parameters\(\)"),
            (model.weight, r"got one Parameter. Write parameters=\[tensor\]"),
            (model.named_parameters(), r"got one that holds a tuple. Write .*for name, p in module.named_parameters"),
        ):
            with pytest.raises(TypeError, match=message):
                strategy.set_gradient_policy(given, scale="SUM")
        parameters = model.parameters()
        torch.optim.SGD(parameters, lr=0.1)
        with pytest.raises(ValueError, match=r"got no parameters.*call it anew"):
            strategy.set_gradient_policy(parameters, scale="SUM")


def test_a_gradient_policy_that_is_refused_changes_nothing(two: Any) -> None:
    with two.scope():
        model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="reduce_at must be one of"):
        two.set_gradient_policy(model.parameters(), scale="SUM", reduce_at="never")

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()

    two.run(step)
    assert model.weight.grad is not None
    assert model.weight.grad.eq(1.0).all()  # the mean, as before
