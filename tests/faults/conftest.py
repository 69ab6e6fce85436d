"""Fixtures of the fault tests: none may leave threads, processes or environment variables behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fault_steps import TWO, assert_usable

import tfstyle_dist as td


@pytest.fixture(scope="session")
def _torch_imports() -> None:
    """What torch imports at the first optimizer step sets environment variables of its own."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


@pytest.fixture(autouse=True)
def _check_for_leaks(_torch_imports: None, no_leaks: None) -> None:
    pass


@pytest.fixture
def two() -> Iterator[Any]:
    """Two replicas, which must still work at the end of the test."""
    with td.MirroredStrategy(TWO) as strategy:
        yield strategy
        assert_usable(strategy)
