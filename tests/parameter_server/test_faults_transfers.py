"""Workers that are killed in the middle of a transfer."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import tfstyle_dist as td

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ELEMENTS = 8 << 20


def wait_for_worker(marker: Path) -> int:
    end = time.monotonic() + 30
    while not (marker.exists() and marker.read_text()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return int(marker.read_text())


@pytest.mark.parametrize("shared", ["0", "1"])
def test_a_worker_is_killed_while_it_pushes(cluster: Any, tmp_path: Path, shared: str) -> None:
    """The server is stopped until the worker is dead: it wakes up to half a push."""
    c = cluster(workers=2, ps=1, env={"TFSTYLE_SHARED_MEMORY": shared})
    with c.strategy.scope():
        small, large = td.Variable(0.0), td.Variable(torch.zeros(ELEMENTS))
    marker, server = tmp_path / "pushing", c.pids["ps", 0]

    def push() -> float:
        small.assign_add(1.0)
        float(small.value())  # the server has that write
        if not marker.exists():
            os.kill(server, signal.SIGSTOP)
            marker.write_text(str(td.coordinator.experimental_get_current_worker_index()))
        large.assign_add(torch.ones(ELEMENTS))
        return float(small.value())

    result = c.coordinator.schedule(push)
    index = wait_for_worker(marker)
    time.sleep(0.3)
    c.kill("worker", index)
    c.signal("ps", 0, signal.SIGCONT)
    assert result.get(timeout=30) == 1.0
    assert float(small.value()) == 1.0
    value = large.value()
    assert float(value.min()) == float(value.max()) == 1.0


@pytest.mark.parametrize("shared", ["0", "1"])
def test_a_worker_is_killed_while_it_pulls(cluster: Any, tmp_path: Path, shared: str) -> None:
    c = cluster(workers=2, ps=1, env={"TFSTYLE_SHARED_MEMORY": shared})
    with c.strategy.scope():
        table = td.Variable(torch.arange(float(ELEMENTS)).reshape(-1, 64))
        count = td.Variable(0, dtype=torch.int64)
    marker = tmp_path / "pulling"

    def pull() -> float:
        count.assign_add(1)
        rows = torch.arange(0, table.shape[0], 2)
        first = not marker.exists()
        if first:
            marker.write_text(str(td.coordinator.experimental_get_current_worker_index()))
        while first:
            table[rows]
        return float(table[rows][-1, 0])

    result = c.coordinator.schedule(pull)
    index = wait_for_worker(marker)
    time.sleep(0.2)
    c.kill("worker", index)
    assert result.get(timeout=30) == float(ELEMENTS - 128)
    assert int(count.value()) == 1
    c.start("worker", index)
    assert c.coordinator.schedule(pull, worker=index).get(timeout=30) == float(ELEMENTS - 128)
    assert all(s["clients"] <= 2 + 2 for s in c.statistics())
