"""A job of which one process never starts."""

from __future__ import annotations

from typing import Any

import pytest

import tfstyle_dist as td
from tfstyle_dist.core.errors import DeadlineExceededError


def alone(rank: int, of: int, **environment: str | None) -> pytest.MarkDecorator:
    """One process that was told that it is one of several."""
    env: dict[str, Any] = {"RANK": str(rank), "WORLD_SIZE": str(of), "TFSTYLE_TIMEOUT_SECONDS": "2", **environment}
    return pytest.mark.distributed(workers=1, timeout=50, env=env)


@alone(0, 3)
def test_it_is_named() -> None:
    words = "worker 1, worker 2 did not start within 2 s: 2 of 3 absent"
    with pytest.raises(DeadlineExceededError, match=words):
        td.MirroredStrategy()


@alone(0, 2, TFSTYLE_RENDEZVOUS_FILE=None, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
def test_it_is_named_by_worker_0_of_a_master_address() -> None:
    with pytest.raises(DeadlineExceededError, match="worker 1 did not start within 2 s: 1 of 2 absent"):
        td.MirroredStrategy()


# The discard port: nobody listens.
@alone(1, 2, TFSTYLE_RENDEZVOUS_FILE=None, MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
def test_a_master_that_never_starts() -> None:
    with pytest.raises(DeadlineExceededError, match=r"127\.0\.0\.1:9"):
        td.MirroredStrategy()


@alone(0, 2, TFSTYLE_RENDEZVOUS_FILE=None)
def test_ranks_without_a_meeting_place() -> None:
    with pytest.raises(ValueError, match="RANK=0 and WORLD_SIZE=2 are set, but neither MASTER_ADDR"):
        td.MirroredStrategy()
