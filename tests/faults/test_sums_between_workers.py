"""A worker that dies or stops in the middle of a sum, on each of the ways that a sum can take."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import PeerLostError, UnavailableError

pytestmark = pytest.mark.slow
WAYS = {
    "MEMORY": ({}, td.AggregationMethod.ADD_N),
    "SLICES": ({"TFSTYLE_SHARED_MEMORY": "0"}, td.AggregationMethod.ADD_N),
    "HALVING": ({"TFSTYLE_SHARED_MEMORY": "0"}, td.AggregationMethod.TREE),
    "HOSTS": ({"TFSTYLE_HOST": "aabb"}, td.AggregationMethod.TREE),
}


def begin(way: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[td.Strategy, Any]:
    """A strategy, and a function that sums on and on until something happens."""
    environment, method = WAYS[way]
    for name, value in environment.items():
        monkeypatch.setenv(name, value[rank] if name == "TFSTYLE_HOST" else value)
    monkeypatch.setenv("TFSTYLE_START_TIMEOUT_SECONDS", "60")  # fresh ranks on a busy machine
    strategy = td.MirroredStrategy()
    group = strategy.worker.group
    assert f": {way}, " in group.explain(3_000_000, torch.float32, method)

    def sum_on() -> None:
        deadline = Deadline(timedelta(seconds=30))
        while not deadline.passed():
            group.all_reduce(torch.ones(3_000_000), "sum", method)

    group.all_reduce(torch.ones(3_000_000), "sum", method)
    return strategy, sum_on


def end(strategy: td.Strategy) -> None:
    """Leaves without waiting for transfers that cannot end."""
    with pytest.raises((PeerLostError, TimeoutError, UnavailableError)):
        strategy.worker.group.all_reduce(torch.ones(3), "sum")  # at once: the group is broken
    strategy.worker.group.abort()
    strategy.close()


def ways(names: Iterable[str], **options: Any) -> pytest.MarkDecorator:
    """Two hosts need four workers; the other ways need three."""
    counts = {name: 4 if name == "HOSTS" else 3 for name in names}
    marks = {name: pytest.mark.distributed(workers=count, timeout=80, **options) for name, count in counts.items()}
    return pytest.mark.parametrize("way", [pytest.param(name, marks=mark) for name, mark in marks.items()])


@ways(WAYS, deadline=8, may_die=(1,))
def test_a_worker_killed_in_the_middle_is_named(
    way: str, rank: int, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, sum_on = begin(way, rank, monkeypatch)
    if rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises((PeerLostError, TimeoutError)) as caught:
        sum_on()
    message = str(caught.value)
    assert f"worker 1 (pid {ranks.pids[1]}" in message
    assert "MISSING, dead" in message
    end(strategy)


@ways(["MEMORY", "SLICES", "HOSTS"], deadline=10)
def test_a_worker_stopped_in_the_middle_is_noticed(
    way: str, rank: int, ranks: Any, monkeypatch: pytest.MonkeyPatch, shared_tmp_path: Path
) -> None:
    strategy, sum_on = begin(way, rank, monkeypatch)
    if rank == 0:
        threading.Timer(0.5, ranks.stop, (1,)).start()
    with pytest.raises((PeerLostError, TimeoutError)) as caught:
        sum_on()
    (shared_tmp_path / f"done{rank}").touch()
    if rank != 1:
        assert "stopped (SIGSTOP)" in str(caught.value)
    if rank == 0:
        while not all((shared_tmp_path / f"done{r}").exists() for r in range(strategy.worker.group.size) if r != 1):
            time.sleep(0.05)
        ranks.resume(1)
    end(strategy)
