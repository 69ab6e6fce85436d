"""The strategy of a test: two replicas in this process, or one for each rank of a distributed test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tfstyle_dist as tfd


@pytest.fixture
def strategy(request: pytest.FixtureRequest) -> Iterator[tfd.Strategy]:
    """Two replicas; ranks if the test is marked ``distributed``."""
    torch.set_num_threads(1)
    ranks = request.node.get_closest_marker("distributed") is not None
    with tfd.MirroredStrategy() if ranks else tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as made:
        yield made
