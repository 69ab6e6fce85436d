"""A small model, its data and its training in plain PyTorch, for the programs of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Builder = Callable[[torch.nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Builder] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
}


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3))


def make_batches(count: int, size: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(count):
        x = torch.randn(size, 6, generator=generator)
        batches.append((x, x[:, :3] ** 2))
    return batches


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def plain_training(
    start: dict[str, torch.Tensor], build: Builder, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the weights of plain PyTorch on the CPU."""
    model = make_model()
    model.load_state_dict(start)
    optimizer = build(model)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def on_cpu(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
