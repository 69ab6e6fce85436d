"""Fixtures of the fault tests: none may leave threads, processes or environment variables behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
import torch.distributed.nn.functional
from fault_steps import TWO, assert_usable

import tfstyle_dist as td

# What torch imports at the first optimizer step takes seconds, and sets environment variables of its own. A rank does
# it here, where no deadline runs: in its first test it would come late to those that live on from the test before.
parameter = torch.nn.Parameter(torch.ones(1))
parameter.grad = torch.ones(1)
torch.optim.SGD([parameter], lr=0.1).step()


@pytest.fixture(autouse=True)
def _check_for_leaks(no_leaks: None) -> None:
    pass


@pytest.fixture
def two() -> Iterator[Any]:
    """Two replicas, which must still work at the end of the test."""
    with td.MirroredStrategy(TWO) as strategy:
        yield strategy
        assert_usable(strategy)
