"""Steps of several replicas that have the same rows, compared with one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ROWS = torch.arange(24, dtype=torch.float64).reshape(3, 4, 2) / 10  # three batches

Step = Callable[[torch.Tensor], Any]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    """A plain step."""
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()


def trained(build: Callable[[], tuple[nn.Module, Step]], strategy: Any = None) -> dict[str, torch.Tensor]:
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


def assert_as_one_device(build: Callable[[], tuple[nn.Module, Step]], strategy: Any) -> None:
    expected, found = trained(build), trained(build, strategy)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
