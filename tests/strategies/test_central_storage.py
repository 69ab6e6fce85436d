"""Central storage in one process: one copy of everything, whatever the replicas do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import on_devices
import pytest
import torch
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.variables import find_record


@pytest.fixture
def central() -> Iterator[Any]:
    """Two replicas on the CPU over central storage."""
    with td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


def storages(parameter: Any) -> set[int]:
    """Where the values of a parameter are in memory."""
    record = find_record(parameter)
    assert record is not None
    return {component.data_ptr() for component in record.components}


def train(strategy: Any, model: nn.Module, optimizer: Any, steps: int = 3, fail: int | None = None) -> None:
    """Some steps; ``fail``: that replica raises between backward and update of the last."""

    def step(last: bool) -> None:
        context = td.get_replica_context()
        assert context is not None
        x = torch.arange(8.0).reshape(2, 4) + context.replica_id_in_sync_group
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        if last and context.replica_id_in_sync_group == fail:
            raise ValueError("a replica broke")
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    for number in range(steps):
        strategy.run(step, args=(number == steps - 1,))


@pytest.mark.cpu_only("it looks at memory that compute and parameter devices share")
def test_there_is_one_copy_of_weights_and_of_the_optimizer_state(central: Any) -> None:
    with central.scope():
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    train(central, model, optimizer)
    assert all(len(storages(p)) == 1 for p in model.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(optimizer.state) == 4
    assert central.extended.parameter_devices == ("cpu:0",)
    assert central.extended.worker_devices == ("cpu:0", "cpu:1")


def test_clipping_in_every_replica_counts_once() -> None:
    def trained(strategy: Any, replicas: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step() -> None:
            optimizer.zero_grad()
            (model(torch.ones(2, 4)) * 100).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        strategy.run(step)
        return [p.detach().clone() for p in model.parameters()]

    with td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1", "cpu:2"]) as strategy:
        ours = trained(strategy, 3)
    with td.OneDeviceStrategy("cpu:0") as strategy:
        torch.testing.assert_close(ours, trained(strategy, 1))


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_scaler_tells_the_one_fused_optimizer_its_scale_once(central: Any, kind: str, unscaled: bool) -> None:
    """Each replica's scaler tells it by attributes, which it takes back after the step."""
    with central.scope():
        model = nn.Linear(2, 1)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, fused=True)
    plain = copy.deepcopy(model)
    theirs = getattr(torch.optim, kind)(plain.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(on_devices.KIND, init_scale=16.0)

    def step(infinite: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 2, device=model.weight.device)).pow(2).mean()).backward()
        if infinite:
            model.weight.grad[0, 0] = float("inf")
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    for number in range(4):
        central.run(step, args=(number == 2,))
        theirs.zero_grad()
        plain(torch.ones(2, 2, device=plain.weight.device)).pow(2).mean().backward()
        if number != 2:
            theirs.step()
    torch.testing.assert_close(model.weight.detach(), plain.weight.detach())
    assert scaler.get_scale() == 8.0
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@pytest.mark.parametrize("fail", [0, 1])
def test_a_replica_that_raises_before_the_update_changes_nothing(central: Any, fail: int) -> None:
    with central.scope():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(central, model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    steps = [int(s["step"]) for s in optimizer.state.values()]
    with pytest.raises(ValueError, match="a replica broke"):
        train(central, model, optimizer, steps=1, fail=fail)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [int(s["step"]) for s in optimizer.state.values()] == steps
    train(central, model, optimizer, steps=1)
    assert not torch.equal(before[0], model.weight)


def test_state_dict_and_evaluation_see_the_one_copy(central: Any) -> None:
    with central.scope():
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(central, model, optimizer)
    central.sync_buffers()
    model.eval()
    plain = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
        outputs = central.run(lambda: model(x)).values
    assert all(torch.equal(o, outputs[0]) for o in outputs)


def test_a_variable_needs_an_aggregation_to_be_written_by_replicas(central: Any) -> None:
    with central.scope():
        variable = td.Variable(1.0, name="v")
    with pytest.raises(ValueError, match="must specify an aggregation method"):
        central.run(lambda: variable.assign(torch.tensor(2.0)))
    assert float(variable.value()) == 1.0


@pytest.mark.cpu_only("it names devices of the CPU in what it expects")
def test_one_compute_device_is_also_the_parameter_device() -> None:
    with td.experimental.CentralStorageStrategy(["cpu:1"]) as strategy:
        assert strategy.extended.parameter_devices == ("cpu:1",)
        assert strategy.num_replicas_in_sync == 1


def test_writes_that_can_be_made_again_are_good(central: Any) -> None:
    """Limits to weights, values of one's own, the write of one replica."""
    with central.scope():
        model, other = nn.Linear(2, 1), nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    nn.init.constant_(model.weight, 5.0)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight.clamp_(-1.0, 1.0)
            model.weight.data.clamp_(-0.75, 0.75)
            model.state_dict()["weight"].data.clamp_(-0.75, 0.75)
            model.bias.fill_(float("nan"))
            model.bias.fill_(0.5)
            if td.get_replica_context().replica_id_in_sync_group == 1:
                other.bias.add_(1.0)

    before = other.bias.item()
    for _ in range(3):
        central.run(step)
    torch.testing.assert_close(model.weight, torch.full((1, 2), 0.75 - 2 * 0.1), rtol=0, atol=1e-6)
    assert model.bias.item() == 0.5
    assert other.bias.item() == pytest.approx(before + 3.0)


def test_an_optimizer_that_steps_another_one_is_refused(central: Any) -> None:
    class Outer(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            super().__init__(base.param_groups, {})
            self.base = base

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.base.step()

    with central.scope():
        model = nn.Linear(2, 1)
        base = torch.optim.SGD(model.parameters(), 0.1)
        outer = Outer(base)

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"Outer.step\(\) called SGD.step\(\). Under central storage"):
        central.run(step, args=(outer,))
    assert torch.equal(model.weight, before)
    central.run(step, args=(base,))
    torch.testing.assert_close(model.weight, before - 0.1)


def test_a_variable_is_one_copy_wherever_its_first_value_was(central: Any) -> None:
    """One of another device was copied to the home device for each replica, and all copies but one went stale."""
    with central.scope():
        v = td.Variable(torch.full((2,), 2.0))
    optimizer = td.train.GradientDescentOptimizer(0.125)
    assert len(storages(v)) == 1
    seen = []
    for _ in range(3):
        central.run(lambda: optimizer.minimize(lambda: (v * v).sum(), var_list=[v]))
        seen.append([float(value[0]) for value in central.experimental_local_results(central.run(lambda: v.value()))])
    assert seen == [[1.0, 1.0], [0.5, 0.5], [0.25, 0.25]]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("hooks", [["pre"], ["post"], ["pre", "post"]], ids="-".join)
@pytest.mark.parametrize("call", ["all_reduce", "merge_call"])
def test_a_call_that_waits_in_the_update_of_all_is_refused(count: int, hooks: list[str], call: str) -> None:
    """The second replica would take the parameters out of the optimizer with which the first one goes on."""
    strategy = td.experimental.CentralStorageStrategy([f"cpu:{i}" for i in range(count)])
    with strategy.scope():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def wait(*_: Any) -> None:
        context = td.get_replica_context()
        context.all_reduce("SUM", torch.ones(2)) if call == "all_reduce" else context.merge_call(lambda _: None)

    for place, hook in zip(hooks, [wait, lambda *_: None], strict=False):
        getattr(optimizer, f"register_step_{place}_hook")(hook)
    with pytest.raises(RuntimeError, match=r"Adam\.step\(\) calls all_reduce.*before or after optimizer\.step\(\)"):
        train(strategy, model, optimizer)
    assert len(optimizer.param_groups[0]["params"]) == 2
