"""Central storage in one process: settings and state of the one optimizer that a step changes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_one_device import Step, assert_as_one_device, update
from torch import nn
from torch.optim import lr_scheduler

import tfstyle_dist as td


@pytest.fixture(params=[2, 3])
def central(request: pytest.FixtureRequest) -> Any:
    with td.experimental.CentralStorageStrategy([f"cpu:{replica}" for replica in range(request.param)]) as strategy:
        yield strategy


class Halving:
    """A scheduler of nobody's: of no class of torch's, with a ``step`` of its own."""

    __slots__ = ("optimizer",)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


class HalvingInTorch(lr_scheduler.LRScheduler):
    """A subclass whose ``step`` calls nothing of torch's."""

    def step(self, epoch: int | None = None) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "own": Halving,
    "of torch's class": HalvingInTorch,
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
    "cycles": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=12),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, 0.5), lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)]
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(central: Any, name: str, place: str) -> None:
    """Every replica finds the rates that it would find alone, before and after its scheduler's step."""
    seen: list[list[Any]] = []

    def build() -> tuple[nn.Module, Step]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        rates: list[Any] = []
        seen.append(rates)

        def step(rows: torch.Tensor) -> None:
            for now in ("before", "between", "after"):
                group = optimizer.param_groups[0]
                rates.append((now, group["lr"], group["momentum"], getattr(scheduler, "last_epoch", None)))
                if now == place:
                    scheduler.step()
                    rates.append(("stepped", group["lr"]))
                if now == "before":
                    optimizer.zero_grad()
                    model(rows).square().mean().backward()
                elif now == "between":
                    optimizer.step()

        return model, step

    assert_as_one_device(build, central)
    alone, together = seen
    assert sorted(map(repr, together)) == sorted(map(repr, alone * central.num_replicas_in_sync))


def test_a_rate_that_is_a_tensor(central: Any) -> None:
    def build() -> tuple[nn.Module, Step]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        model.register_buffer("rate", torch.zeros(()))

        def step(rows: torch.Tensor) -> None:
            update(model, optimizer, rows)
            scheduler.step()
            model.rate = optimizer.param_groups[0]["lr"].clone()

        return model, step

    assert_as_one_device(build, central)


def test_settings_of_ones_own_are_refused(central: Any) -> None:
    with central.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step() -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * td.get_replica_context().replica_id_in_sync_group

    with pytest.raises(RuntimeError, match=r"\['lr'\] became 0.0 in replica 0 and 0.1 in replica 1.*all_reduce"):
        central.run(step)


def test_optimizers_that_a_step_makes(central: Any) -> None:
    """One may get the ``id`` of another replica's, which is gone."""

    def build() -> tuple[nn.Module, Step]:
        model = nn.Linear(2, 1)

        def step(rows: torch.Tensor) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            update(model, optimizer, rows)

        return model, step

    assert_as_one_device(build, central)


@pytest.mark.parametrize("alone", [0, 1])
def test_a_setting_that_one_replica_alone_gives_counts_and_is_said(
    central: Any, caplog: pytest.LogCaptureFixture, nothing_said_yet: None, alone: int
) -> None:
    with central.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step() -> None:
        if td.get_replica_context().replica_id_in_sync_group == alone:
            optimizer.param_groups[0]["lr"] = 0.125
        optimizer.param_groups[0]["momentum"] = 0.5

    central.run(step)
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert f"'lr' of group 0 in SGD.param_groups was changed by replica {alone} in strategy.run" in caplog.text
    assert "momentum" not in caplog.text


def test_a_setting_that_a_replica_which_raised_did_not_give_is_not_said(
    central: Any, caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    with central.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step() -> None:
        if td.get_replica_context().replica_id_in_sync_group == 1:
            raise ValueError("no batch")
        optimizer.param_groups[0]["lr"] = 0.125
        model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(ValueError, match="no batch"):
        central.run(step)
    central.run(lambda: None)
    assert "was changed by replica" not in caplog.text


def test_the_schedule_of_an_optimizer_that_each_replica_made_is_not_said(
    central: Any, caplog: pytest.LogCaptureFixture, nothing_said_yet: None
) -> None:
    with central.scope():
        model = nn.Linear(2, 1)

    def step() -> None:
        if not hasattr(model, "optimizer"):
            model.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # type: ignore[assignment]
            model.schedule = torch.optim.lr_scheduler.StepLR(model.optimizer, 1, 0.5)  # type: ignore[arg-type]
        model(torch.ones(1, 2)).sum().backward()
        model.optimizer.step()
        model.schedule.step()

    for _ in range(3):
        central.run(step)
    assert model.optimizer.param_groups[0]["lr"] == 0.0625
    assert "was changed by replica" not in caplog.text


def test_a_setting_that_is_an_object_of_the_programs(central: Any) -> None:
    """What is in it cannot be put back, so a second write is refused."""
    with central.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.param_groups[0]["seen"] = []

    with pytest.raises(RuntimeError, match=r"\['seen'\] was changed by replica 0 and then by replica 1"):
        central.run(lambda: optimizer.param_groups[0]["seen"].append(1))


# ---- the state of the optimizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["in place", "other", "number"])
def test_state_that_each_replica_writes_to_is_refused(central: Any, write: str) -> None:
    """Values before it are not known."""
    with central.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state = optimizer.state[model.weight]
        if write == "in place":
            state["exp_avg"].mul_(0.5)
        elif write == "other":
            state["exp_avg"] = state["exp_avg"] * 0.5
        else:
            state["counted"] = state.get("counted", 0) + 1

    with pytest.raises(RuntimeError, match=r"optimizer.state\[...\]\['\w+'\] was written to by replica 0 and then by"):
        central.run(step)


def test_state_that_is_set_to_something_is_good(central: Any) -> None:
    with central.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
            state["restarted"] = True

    for _ in range(3):
        central.run(step)
    assert not optimizer.state[model.weight]["exp_avg"].any()


def test_a_group_that_a_step_adds(central: Any) -> None:
    def build() -> tuple[nn.Module, Step]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)

        def step(rows: torch.Tensor) -> None:
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.05})
            assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.05]
            update(model, optimizer, rows)

        return model, step

    assert_as_one_device(build, central)


def test_a_rate_that_is_a_tensor_beside_a_new_optimizer(central: Any) -> None:
    """What the step has written before the new one was made is not forgotten."""

    def build() -> tuple[nn.Module, Step]:
        model, other = nn.Linear(2, 1), nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), foreach=False)

        def step(rows: torch.Tensor) -> None:
            update(model, optimizer, rows)
            optimizer.param_groups[0]["lr"].mul_(0.5)
            torch.optim.SGD(other.parameters(), lr=0.1).step()

        return model, step

    assert_as_one_device(build, central)


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize(
    "remove",
    [
        lambda groups: groups.pop(),
        lambda groups: groups.pop(0),
        lambda groups: groups.__setitem__(slice(None), groups[:-1]),
    ],
    ids=["last", "first", "others"],
)
def test_groups_that_every_replica_removes_are_said(remove: Callable[[Any], Any], place: str) -> None:
    """It was done once for each replica, in silence where they took the last one."""
    with td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nn.ModuleList(nn.Linear(2, 1) for _ in range(4))
        groups = [{"params": list(part.parameters()), "lr": 0.1 * (k + 1)} for k, part in enumerate(model)]
        optimizer = torch.optim.SGD(groups, lr=0.1)

        def step(removes: bool) -> None:
            if removes and place == "before":
                remove(optimizer.param_groups)
            sum(part(torch.ones(1, 2)).sum() for part in model).backward()  # type: ignore[union-attr]
            optimizer.step()
            if removes and place == "after":
                remove(optimizer.param_groups)

        strategy.run(step, args=(False,))
        words = r"parameter groups of SGD were 4, then 3 by replica 0, and 2 by replica 1.*Do it after strategy.run"
        with pytest.raises(RuntimeError, match=words):
            strategy.run(step, args=(True,))


def test_groups_that_the_first_replica_alone_removes() -> None:
    with td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            model = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))
        optimizer = torch.optim.SGD([{"params": list(part.parameters())} for part in model], lr=0.1)

        def step() -> int:
            sum(part(torch.ones(1, 2)).sum() for part in model).backward()  # type: ignore[union-attr]
            optimizer.step()
            if len(optimizer.param_groups) > 2:
                optimizer.param_groups.pop()
            return len(optimizer.param_groups)

        assert [strategy.run(step) for _ in range(2)] == [2, 2]
