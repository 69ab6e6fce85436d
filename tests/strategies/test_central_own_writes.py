"""Central storage in one process: what a step writes itself to parameters, it writes once for all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_one_device import Step, assert_as_one_device
from torch import nn

import tfstyle_dist as td
from tfstyle_dist.variables.central import shared_writes

ON_CPUS = pytest.mark.cpu_only("devices compute with copies, which the memory that was kept is none of")


@pytest.fixture(params=[2, 3])
def central(request: pytest.FixtureRequest) -> Any:
    with td.experimental.CentralStorageStrategy([f"cpu:{replica}" for replica in range(request.param)]) as strategy:
        yield strategy


class _WithAverage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(2, 1)
        self.average = copy.deepcopy(self.own).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.own(rows).square().mean()


def _update(how: str, average: torch.Tensor, own: torch.Tensor) -> None:
    if how == "in place":
        average.mul_(0.5).add_(own, alpha=0.5)
    elif how == "data in place":
        average.data.mul_(0.5).add_(own.data, alpha=0.5)
    elif how == "other data":
        average.data = average.data * 0.5 + own.data * 0.5
    elif how == "part":
        average.detach()[..., 0].data.add_(own[..., 0])
    else:
        average.set_(average * 0.5 + own * 0.5)


@pytest.mark.parametrize("place", ["before", "after backward", "after"])
@pytest.mark.parametrize("how", ["in place", "data in place", "other data", "part", "set_"])
def test_running_averages(central: Any, how: str, place: str) -> None:
    def build() -> tuple[nn.Module, Step]:
        model = _WithAverage()
        optimizer = torch.optim.Adam(model.own.parameters(), lr=0.1)

        def average(now: str) -> None:
            if now == place:
                with torch.no_grad():
                    for mean, own in zip(model.average.parameters(), model.own.parameters(), strict=True):
                        _update(how, mean, own)

        def step(rows: torch.Tensor) -> None:
            optimizer.zero_grad()
            average("before")
            model(rows).backward()
            average("after backward")
            optimizer.step()
            average("after")

        return model, step

    assert_as_one_device(build, central)


def _perturbed(model: nn.Module, optimizer: Any) -> Step:
    """Sharpness-aware: there, and back."""

    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        moves = [0.05 * p.grad for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()

    return step


def _by_hand(model: nn.Module, optimizer: Any) -> Step:
    def step(rows: torch.Tensor) -> None:
        model.zero_grad()
        model(rows).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    return step


def _exchanged(model: nn.Module, optimizer: Any) -> Step:
    """Weights that take each other's memory, and give it back in the next call."""
    other = copy.deepcopy(model)

    def exchange() -> None:
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            one.data, two.data = two.data, one.data

    def step(rows: torch.Tensor) -> None:
        exchange()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        exchange()
        optimizer.step()
        with torch.no_grad():
            for one, two in zip(model.parameters(), other.parameters(), strict=True):
                two.lerp_(one, 0.5)

    return step


@pytest.mark.parametrize("made", [_perturbed, _by_hand, _exchanged])
def test_steps_that_write_to_the_trained_weights(central: Any, made: Callable[..., Step]) -> None:
    def build() -> tuple[nn.Module, Step]:
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        return model, made(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    assert_as_one_device(build, central)


@ON_CPUS
def test_memory_that_was_kept_is_written_to_once(central: Any) -> None:
    with central.scope():
        model = nn.Linear(2, 1)
    kept, before = model.state_dict(), model.weight.detach().clone()

    def step() -> None:
        kept["weight"].data.copy_(kept["weight"].data * 0.5 + torch.ones(1, 2))

    central.run(step)
    assert torch.equal(model.weight, before * 0.5 + 1)


def test_values_of_ones_own_are_refused(central: Any) -> None:
    with central.scope():
        model = nn.Linear(2, 1)

    def step() -> None:
        with torch.no_grad():
            model.weight.copy_(torch.ones(1, 2) * td.get_replica_context().replica_id_in_sync_group)

    with pytest.raises(RuntimeError, match=r"written to by replica 0 and then by replica 1 .* gave it other values"):
        central.run(step)


def test_values_that_are_not_known_are_refused(central: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very many parameters no values are kept before it is known that steps write to them."""
    monkeypatch.setattr(shared_writes, "_MOST_KEPT", 0)
    with central.scope():
        model = nn.Linear(2, 1)

    def step() -> None:
        with torch.no_grad():
            model.weight.mul_(0.5)

    with pytest.raises(RuntimeError, match=r"changed it again.*values before the first write are not known"):
        central.run(step)


def test_writes_that_begin_late_are_known_where_data_was_read(central: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_writes, "_MOST_KEPT", 0)
    with central.scope():
        model = nn.Linear(2, 1)
    before = model.weight.detach().clone()

    def step(write: bool) -> None:
        if write:
            model.weight.data.mul_(0.5)

    for write in (False, True, True):
        central.run(step, args=(write,))
    assert torch.equal(model.weight, before / 4)


def test_a_step_that_raises_has_written_once(central: Any) -> None:
    with central.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.detach().clone()

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.param_groups[0]["lr"] *= 0.5
        with torch.no_grad():
            model.weight.mul_(0.5)
        raise ValueError("a batch that cannot be used")

    with pytest.raises(ValueError, match="cannot be used"):
        central.run(step)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert torch.equal(model.weight, before * 0.5)


@pytest.mark.parametrize("alone", ["first", "last"])
def test_one_replica_alone_is_said(
    central: Any, caplog: pytest.LogCaptureFixture, nothing_said_yet: None, alone: str
) -> None:
    """As of what is done once: the others find the values before until their next call."""
    writer = 0 if alone == "first" else central.num_replicas_in_sync - 1
    with central.scope():
        model = nn.Linear(5, 1)

    def step() -> None:
        if td.get_replica_context().replica_id_in_sync_group == writer:
            with torch.no_grad():
                model.weight.fill_(0.5)

    central.run(step)
    assert torch.equal(model.weight, torch.full_like(model.weight, 0.5))
    other = 1 if alone == "first" else 0
    assert f"was written to by replica {writer} in strategy.run, and not by replica {other}" in caplog.text


def test_a_graph_that_has_seen_the_values_before_raises(central: Any) -> None:
    with central.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def step() -> None:
        context = td.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            with torch.no_grad():
                model[1].weight.mul_(0.5)
        loss = model(torch.ones(1, 2)).square().mean()
        context.all_reduce("SUM", torch.ones(1))
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        central.run(step)


@pytest.mark.cpu_only("devices compute with copies, which another replica's write counts for too")
@pytest.mark.parametrize("write", ["mul_", "clamp_"])
def test_a_graph_that_is_alive_while_another_replica_writes(central: Any, write: str) -> None:
    """Forward, another call of all, and backward, after a write that all make."""

    def build() -> tuple[nn.Module, Step]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(rows: torch.Tensor) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9) if write == "mul_" else parameter.clamp_(-0.3, 0.3)
            loss = model(rows).square().mean()
            context = td.get_replica_context() if td.has_strategy() else None
            if context is not None and context.num_replicas_in_sync > 1:
                context.all_reduce("MEAN", loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return model, step

    assert_as_one_device(build, central)


@pytest.mark.parametrize("raising", [0, 1])
def test_after_a_replica_has_raised_all_go_on_with_what_the_first_one_has(central: Any, raising: int) -> None:
    """Its scheduler's counters, the rate, and the average belong together."""
    with central.scope():
        model = _WithAverage()
        optimizer = torch.optim.SGD(model.own.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).backward()
        optimizer.step()
        if td.get_replica_context().replica_id_in_sync_group == raising:
            raise ValueError("after the step")
        scheduler.step()
        with torch.no_grad():
            model.average.weight.mul_(0.5)

    before = model.average.weight.detach().clone()
    with pytest.raises(ValueError, match="after the step"):
        central.run(step)
    stepped = int(raising != 0)
    assert scheduler.last_epoch == stepped
    assert optimizer.param_groups[0]["lr"] == 0.5 * 0.5**stepped
    assert torch.equal(model.average.weight, before * 0.5**stepped)


@pytest.mark.parametrize("how", ["data", "set_"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_weights_that_expand_made(central: Any, how: str, place: str) -> None:
    """All of their rows lie in the same memory, which torch does not write to as a whole."""

    def build() -> tuple[nn.Module, Step]:
        model = nn.Linear(2, 3)

        def write(rows: torch.Tensor) -> None:
            values = (model.weight.detach()[:1] + rows.mean()).expand(3, 2)
            if how == "data":
                model.weight.data = values
            else:
                with torch.no_grad():
                    model.weight.set_(values)

        def step(rows: torch.Tensor) -> None:
            if place == "before":
                write(rows)
            model(rows).square().mean().backward()
            if place == "after":
                write(rows)

        return model, step

    assert_as_one_device(build, central)
