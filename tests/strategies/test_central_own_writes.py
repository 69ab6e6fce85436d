"""Central storage in one process: what a step writes itself to parameters and settings, it writes once for all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import tfstyle_dist as td
from tfstyle_dist.variables import shared_writes

ON_CPUS = pytest.mark.cpu_only("devices compute with copies, which the memory that was kept is none of")
ROWS = torch.arange(24, dtype=torch.float64).reshape(3, 4, 2) / 10  # three batches

Step = Callable[[torch.Tensor], Any]


@pytest.fixture(params=[2, 3])
def central(request: pytest.FixtureRequest) -> Any:
    with td.experimental.CentralStorageStrategy([f"cpu:{replica}" for replica in range(request.param)]) as strategy:
        yield strategy


def _trained(build: Callable[[], tuple[nn.Module, Step]], strategy: Any = None) -> dict[str, torch.Tensor]:
    """The state of the model after a step with each batch, thrice: the same rows for all replicas."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    if strategy is None:
        model, step = build()
    else:
        with strategy.scope():
            model, step = build()
    for rows in (*ROWS, *ROWS, *ROWS):
        step(rows) if strategy is None else strategy.run(step, args=(rows,))
    return {name: value.clone() for name, value in model.state_dict().items()}


def _assert_as_one_device(build: Callable[[], tuple[nn.Module, Step]], strategy: Any) -> None:
    expected, found = _trained(build), _trained(build, strategy)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


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

    _assert_as_one_device(build, central)


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

    _assert_as_one_device(build, central)


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


# ---- settings -----------------------------------------------------------------------------------------------------


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

    _assert_as_one_device(build, central)
    alone, together = seen
    assert sorted(map(repr, together)) == sorted(map(repr, alone * central.num_replicas_in_sync))


def test_a_rate_that_is_a_tensor(central: Any) -> None:
    def build() -> tuple[nn.Module, Step]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        model.register_buffer("rate", torch.zeros(()))

        def step(rows: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
            scheduler.step()
            model.rate = optimizer.param_groups[0]["lr"].clone()

        return model, step

    _assert_as_one_device(build, central)


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
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()

        return model, step

    _assert_as_one_device(build, central)


def test_a_setting_that_one_replica_alone_gives_counts(central: Any) -> None:
    with central.scope():
        model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step() -> None:
        if td.get_replica_context().replica_id_in_sync_group == 1:
            optimizer.param_groups[0]["lr"] = 0.125

    central.run(step)
    assert optimizer.param_groups[0]["lr"] == 0.125


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
        optimizer.load_state_dict(optimizer.state_dict())

    for _ in range(3):
        central.run(step)
    assert not optimizer.state[model.weight]["exp_avg"].any()
