"""Fixtures of the strategy tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tfstyle_dist as td


@pytest.fixture
def two() -> Iterator[Any]:
    """A strategy of two replicas on the CPU."""
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy
