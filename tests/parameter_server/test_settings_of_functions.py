"""Settings of optimizers that change while functions wait: each function has those with which it was scheduled."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import tfstyle_dist as tfd
from tfstyle_dist.parameter_server.server.told_settings import ToldSettings

pytestmark = pytest.mark.timeout(120)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
KINDS: dict[str, dict[str, Any]] = {"SGD": {}, "momentum": {"momentum": 0.5}, "Adam": {}}


def made(c: Any, kind: str) -> tuple[nn.Module, Any, Any, Any]:
    with c.strategy.scope():
        model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    alone = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(alone.weight)
    rule = torch.optim.Adam if kind == "Adam" else torch.optim.SGD
    return model, rule(model.parameters(), lr=1.0, **KINDS[kind]), alone, rule(alone.parameters(), 1.0, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_steps_while_functions_wait(cluster: Any, kind: str) -> None:
    c = cluster(workers=1, ps=1)
    model, optimizer, alone, theirs = made(c, kind)

    def step(net: nn.Module, rule: Any) -> float:
        rule.zero_grad()
        net(torch.ones(1, 1)).sum().backward()
        rule.step()
        return float(rule.param_groups[0]["lr"])

    def work() -> float:
        time.sleep(0.01)  # all others are scheduled before the first ones end
        return step(model, optimizer)

    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=40) for o in (optimizer, theirs)]
    rates, expected = [], []
    for _ in range(40):
        rates.append(c.coordinator.schedule(work))
        expected.append(step(alone, theirs))
        for schedule in schedules:
            schedule.step()
    assert c.coordinator.statistics().finished < 35
    c.coordinator.join(timeout=60)
    assert c.coordinator.fetch(rates) == pytest.approx(expected)
    torch.testing.assert_close(model.weight.detach().clone(), alone.weight.detach())
    assert step(model, optimizer) == pytest.approx(step(alone, theirs))  # the program's own step has the newest ones


def test_settings_of_waiting_functions_are_in_snapshots(cluster: Any, tmp_path: Path) -> None:
    c = cluster(workers=1, ps=1, snapshot_folder=tmp_path / "kept", snapshot_seconds=0.1, snapshot_every_write=True)
    model, optimizer, _, _ = made(c, "SGD")
    go = tmp_path / "go"

    def step(wait: bool) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        end = time.monotonic() + 30
        while wait and not go.exists() and time.monotonic() < end:
            time.sleep(0.01)
        optimizer.step()

    c.coordinator.schedule(step, args=(False,))
    c.coordinator.join(timeout=30)
    for rate in (0.5, 0.25, 0.125):
        optimizer.param_groups[0]["lr"] = rate
        c.coordinator.schedule(step, args=(True,))
    c.kill("ps", 0)
    c.start("ps", 0)
    go.touch()
    c.coordinator.join(timeout=60)
    assert float(model.weight.detach()) == -1.875


@pytest.mark.parametrize("by_function", [True, False])
def test_a_rate_that_is_on_servers_is_refused(cluster: Any, by_function: bool) -> None:
    c = cluster(workers=1, ps=1)
    model, _, _, _ = made(c, "SGD")
    with c.strategy.scope():
        rate = tfd.Variable(1.0, trainable=False, name="rate")
    optimizer = tfd.train.GradientDescentOptimizer((lambda: rate) if by_function else rate)

    def step() -> None:
        optimizer.minimize(lambda: model(torch.ones(1, 1)).sum(), var_list=list(model.parameters()))

    with pytest.raises(TypeError, match="GradientDescentOptimizer has 'rate', which is on parameter servers"):
        c.coordinator.schedule(step)


def test_what_is_told_is_found_by_the_function() -> None:
    told = ToldSettings()
    told.tell([{"lr": 2}], [{"lr": 1}], 5, 0)
    told.tell([{"lr": 3, "momentum": 0.5}], [{"lr": 2, "momentum": 0}], 7, 0)
    for groups in (told, ToldSettings.of(told.state())):
        assert groups.switch(4) == [{"lr": 1, "momentum": 0}]
        assert groups.switch(3) is None
        assert groups.switch(6) == [{"lr": 2, "momentum": 0}]
        assert groups.switch(0) == [{"lr": 3, "momentum": 0.5}]
        assert groups.switch(9) is None
    told.tell([{"lr": 4}], [{"lr": 3}], 7, 6)  # before the next function is scheduled; the first four are finished
    assert told.state() == {"since": [5, 7], "groups": [[{"lr": 2, "momentum": 0}], [{"lr": 4, "momentum": 0.5}]]}
    told.tell([{"lr": 5}], None, 8, 0)
    assert told.switch(6) == [{"lr": 5, "momentum": 0.5}]
