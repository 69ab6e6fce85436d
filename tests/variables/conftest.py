"""The strategy of most tests here: two replicas in this process, each with copies of the parameters or with one set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tfstyle_dist as td


@pytest.fixture(params=[td.MirroredStrategy, td.experimental.CentralStorageStrategy])
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two replicas on CPUs."""
    with request.param(["cpu:0", "cpu:1"]) as made:
        yield made
