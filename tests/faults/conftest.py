"""Fixtures of the fault tests: none may leave threads, processes or environment variables behind."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def _torch_imports() -> None:
    """What torch imports at the first optimizer step sets environment variables of its own."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


@pytest.fixture(autouse=True)
def _check_for_leaks(_torch_imports: None, no_leaks: None) -> None:
    pass
