"""Fixtures of the strategy tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tfstyle_dist as td


@pytest.fixture
def two() -> Iterator[Any]:
    """A strategy of two replicas on the CPU."""
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy


@pytest.fixture
def central() -> Iterator[Any]:
    """Central storage over all ranks."""
    torch.set_num_threads(1)
    gc.collect()  # a model of an earlier test would still be shared
    with td.experimental.CentralStorageStrategy() as strategy:
        yield strategy
