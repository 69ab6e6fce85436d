"""A small transformer, its data, and its training in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WORDS, WIDTH, HEADS = 12, 8, 2
PLAN = {"*.query": "column", "*.key": "column", "*.value": "column", "*.out": "row", "*.up": "column", "*.down": "row"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The gradient of a bias of the keys is zero but for rounding, which Adam would blow up.
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # -1: as many heads as this worker has.
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(hidden), Block(hidden))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(words))))


def batches(count: int, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        words = torch.randint(WORDS, (size, 6), generator=generator, device="cpu")
        found.append((words[:, :-1], words[:, 1:]))
    return found


def loss_of(model: nn.Module, words: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1), following.flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def plain_training(
    start: dict[str, Any], steps: list[tuple[torch.Tensor, torch.Tensor]], hidden: int = 16
) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    """Losses, model and optimizer of a run without any strategy."""
    model = Transformer(hidden)
    model.load_state_dict(start)
    optimizer = make_optimizer(model)
    losses = []
    for batch in steps:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model, optimizer
