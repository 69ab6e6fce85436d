"""Strategies that nobody closes: collecting them does not wait, and the tasks are told when the program ends."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import UnavailableError

pytestmark = pytest.mark.timeout(90)
CHIEF = """
import gc, json, os, signal, subprocess, sys, weakref
import torch
import tfstyle_dist as td

def train(how):
    if how.isdigit():  # the server is late by half a second
        from tfstyle_dist.coordinator.worker_pool import WorkerPool
        start = WorkerPool.__init__
        def late(self, *arguments):
            os.kill(int(how), signal.SIGSTOP)
            subprocess.Popen(["sh", "-c", "sleep 0.5; kill -CONT " + how])
            start(self, *arguments)
        WorkerPool.__init__ = late
    spec = td.cluster_resolver.ClusterSpec(json.loads(sys.argv[1]))
    strategy = td.ParameterServerStrategy(td.cluster_resolver.SimpleClusterResolver(spec, "", "chief", 0))
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    model(torch.ones(2))
    if how != "no coordinator":
        coordinator = td.coordinator.ClusterCoordinator(strategy)
        assert coordinator.schedule(lambda: 3).get(timeout=30) == 3
        if how == "closed coordinator":
            coordinator.close()
    return weakref.ref(strategy)

gc.disable()
found = train(sys.argv[2])
assert found() is not None, "it refers to itself"
print("dropped", flush=True)
gc.collect()
assert found() is None
print("collected", flush=True)
"""


def drop(c: Any, how: str) -> None:
    """Runs a program that uses a strategy of these tasks and forgets it."""
    command = [sys.executable, "-c", CHIEF, json.dumps(c.spec), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "dropped\ncollected\n"), done.stderr


@pytest.mark.parametrize("how", ["no coordinator", "closed coordinator"])
def test_a_dropped_strategy_is_collected_without_a_wait(cluster: Any, how: str) -> None:
    drop(cluster(workers=1, ps=1, coordinator=False), how)


def test_the_tasks_of_a_dropped_strategy_end_with_the_program(cluster: Any) -> None:
    c = cluster(workers=1, ps=1, coordinator=False)
    drop(c, "running coordinator")
    assert [c.wait(job, 0) for job in ("worker", "ps")] == [0, 0]


def test_a_task_that_is_late_when_the_program_ends_is_told(cluster: Any) -> None:
    c = cluster(workers=1, ps=1, coordinator=False)
    drop(c, str(c.pids["ps", 0]))
    assert [c.wait(job, 0) for job in ("worker", "ps")] == [0, 0]


def test_what_is_left_of_a_closed_strategy_says_so(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        value = td.Variable(torch.zeros(2))
    c.strategy.close()
    with pytest.raises(UnavailableError, match=r"strategy\.close\(\)"):
        value.value()
