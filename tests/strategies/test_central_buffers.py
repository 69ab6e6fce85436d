"""Buffers under central storage: each replica has its own where it computes; outside of steps all are at home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as td

TWO = ["cpu:0", "cpu:1"]
Numbers = list[torch.Tensor]


class Counting(nn.Module):
    """Keeps a mean that it binds anew, a count that it adds to, and a tensor that nobody writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scales", torch.linspace(1, 2, 4, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean: torch.Tensor = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.count += 1
        return (x - self.mean) * self.scales


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Counting(), nn.Linear(4, 1)).double()
    state = {n: torch.linspace(-1, 1, v.numel()).view_as(v) for n, v in model.named_parameters()}
    model.load_state_dict(state, strict=False)
    return model


def data(number: int, device: torch.device) -> torch.Tensor:
    replica = td.get_replica_context()
    share = 0 if replica is None else replica.replica_id_in_sync_group
    return torch.linspace(0, 1 + number + share, 12, dtype=torch.float64).sin().view(4, 3).to(device)


def one_run(strategy: td.Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    def step() -> None:
        optimizer.zero_grad()
        weight: torch.Tensor = model[0].weight  # type: ignore[index, assignment]
        loss = model(data(number, weight.device)).square().sum()
        loss.backward()
        optimizer.step()

    strategy.run(step)


def plain(strategy: td.Strategy, model: nn.Module, run: Callable[[int], None], folder: Path) -> Any:
    for number in range(3):
        run(number)


def evaluated_outside(strategy: td.Strategy, model: nn.Module, run: Callable[[int], None], folder: Path) -> Any:
    found = []
    for number in range(2):
        run(number)
        model.eval()
        found.append(model(torch.ones(2, 3, dtype=torch.float64).to(model[0].weight.device)))  # type: ignore[index]
        model.train()
    return torch.cat(found).detach()


def trained_outside(strategy: td.Strategy, model: nn.Module, run: Callable[[int], None], folder: Path) -> Any:
    run(0)
    model(torch.ones(2, 3, dtype=torch.float64).to(model[0].weight.device))  # type: ignore[index]
    run(1)


def loaded(strategy: td.Strategy, model: nn.Module, run: Callable[[int], None], folder: Path) -> Any:
    run(0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    run(1)
    model.load_state_dict(state)
    run(2)


def checkpointed(strategy: td.Strategy, model: nn.Module, run: Callable[[int], None], folder: Path) -> Any:
    checkpoint = td.train.Checkpoint(model=model)
    run(0)
    path = checkpoint.save(str(folder / "buffers"))
    run(1)
    checkpoint.restore(path)
    run(2)


def written(strategy: td.Strategy, model: nn.Module, run: Callable[[int], None], folder: Path) -> Any:
    run(0)
    model[1].reset_running_stats()  # type: ignore[index, operator]
    model[2].scales[0] = 3.0  # type: ignore[index]
    run(1)
    model[2].scales = model[2].scales * 2  # type: ignore[index]
    run(2)


def result_of(kind: Any, program: Any, folder: Path) -> tuple[Numbers, Any, set[str]]:
    """The weights and buffers outside and of every replica, what the program returns, and where buffers are outside."""
    with kind(TWO) as strategy:
        with strategy.scope(), torch.device("cpu"):
            model = build()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        returned = program(strategy, model, lambda n: one_run(strategy, model, optimizer, n), folder)
        each = strategy.run(lambda: [t.detach().clone() for t in (*model.parameters(), *model.buffers())])
        outside = [t.detach().cpu() for t in (*model.parameters(), *model.buffers())]
        everywhere = [v.cpu() for values in each for v in strategy.experimental_local_results(values)]
        return [*outside, *everywhere], returned, {str(b.device) for b in model.buffers()}


@pytest.mark.parametrize("program", [plain, evaluated_outside, trained_outside, loaded, checkpointed, written])
def test_buffers_are_those_of_mirrored_replicas(program: Any, tmp_path: Path) -> None:
    expected, told, _ = result_of(td.MirroredStrategy, program, tmp_path / "mirrored")
    found, tells, places = result_of(td.experimental.CentralStorageStrategy, program, tmp_path / "central")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tells.cpu() if tells is not None else None, told.cpu() if told is not None else None)
    assert places == {"cpu"}  # beside the parameters


class Tied(nn.Module):
    """Has a buffer that is the memory of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, dtype=torch.float64)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)
        self.register_buffer("same", self.layer.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.same.T


def test_a_buffer_that_is_the_memory_of_a_parameter() -> None:
    def weights_of(kind: Any) -> torch.Tensor:
        with kind(TWO) as strategy:
            with strategy.scope(), torch.device("cpu"):
                model = Tied()
                optimizer = torch.optim.SGD(model.parameters(), 0.01)

            def step() -> None:
                optimizer.zero_grad()
                model(torch.ones(2, 3, dtype=torch.float64).to(model.layer.weight.device)).square().sum().backward()
                optimizer.step()

            for _ in range(3):
                strategy.run(step)
            return model.layer.weight.detach().cpu()

    central = weights_of(td.experimental.CentralStorageStrategy)
    torch.testing.assert_close(central, weights_of(td.MirroredStrategy), rtol=1e-12, atol=1e-12)


def test_buffers_that_the_program_put_on_the_device_stay_there() -> None:
    with td.experimental.CentralStorageStrategy(TWO) as strategy:
        with strategy.scope():
            model = build()  # where the suites run on devices it begins there
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = {str(t.device) for t in (*model.parameters(), *model.buffers())}
        one_run(strategy, model, optimizer, 0)
        assert {str(t.device) for t in (*model.parameters(), *model.buffers())} == before
