"""Training on local replicas of devices, to be compared with the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from device_kind import KIND, load_kind
from torch import nn

import tfstyle_dist as td

ACCELERATOR = load_kind()
CPU = ["cpu:0", "cpu:1"]
ONE, TWO = [f"{KIND}:0#0", f"{KIND}:0#1"], [f"{KIND}:0", f"{KIND}:1"]
several = pytest.mark.skipif(ACCELERATOR.device_count() < 2, reason="needs two devices")
on_devices = pytest.mark.parametrize(
    "devices", [pytest.param(ONE, id="one device"), pytest.param(TWO, id="two devices", marks=several)]
)
# On the pretend accelerator the CPU computes; a real one rounds in another order.
CLOSE: dict[str, float] = {"rtol": 1e-6, "atol": 1e-7} if KIND == "pretend" else {"rtol": 1e-3, "atol": 1e-4}
LOOSER: dict[str, float] = {key: limit * 10 for key, limit in CLOSE.items()}


def on_all(strategy: td.Strategy, make: Callable[[int], torch.Tensor]) -> Any:
    """A value for each replica, made on the CPU, on the replica's device."""

    def place(context: td.experimental.ValueContext) -> torch.Tensor:
        number = context.replica_id_in_sync_group
        return make(number).to(strategy.worker.torch_device(number))

    return strategy.experimental_distribute_values_from_function(place)


def inputs(number: int, rows: int = 4, width: int = 3) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(number)) + number


def built(strategy: td.Strategy, build: Callable[[], nn.Module]) -> nn.Module:
    """A module that is built in the scope, with the values that the CPU draws: a real device draws others."""
    torch.manual_seed(0)
    drawn = build()
    with strategy.scope():
        model = build()
    model.load_state_dict(drawn.state_dict())
    return model


def train(
    devices: Sequence[str],
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    steps: int = 3,
    make: Callable[[int], torch.Tensor] = inputs,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.Adam(p, 0.05),
) -> list[torch.Tensor]:
    """What replicas have after some steps, which must be the same on all of them: parameters, buffers."""
    with td.MirroredStrategy(devices) as strategy:
        model = built(strategy, build)
        update = optimizer(model.parameters())

        def step(x: torch.Tensor) -> list[torch.Tensor]:
            update.zero_grad()
            loss(model, x).backward()
            update.step()
            return [p.detach().clone() for p in model.parameters()]

        x = on_all(strategy, make)
        for _ in range(steps):
            found = strategy.run(step, args=(x,))
        columns = [strategy.experimental_local_results(value) for value in found]
        for first, second in columns:
            assert torch.equal(first.cpu(), second.cpu())
        return [first.cpu() for first, _ in columns]


def assert_as_on_the_cpu(devices: Sequence[str], *args: Any, **kwargs: Any) -> None:
    torch.testing.assert_close(train(devices, *args, **kwargs), train(CPU, *args, **kwargs), **CLOSE)


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))


def plain_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).sum()
