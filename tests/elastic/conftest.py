"""Fixtures of the elastic tests: jobs of several real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as tfd

_HERE = Path(__file__).parent
Job = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def strategy() -> Iterator[Any]:
    torch.manual_seed(5)
    elastic = tfd.experimental.Elastic(replicas=4)
    with tfd.MultiWorkerMirroredStrategy(elastic=elastic) as made:
        yield made


@pytest.fixture(scope="session")
def run_job() -> Iterator[Job]:
    """Runs elastic_train.py with some workers; gives for each its exit code, its output and its result."""
    command = [sys.executable, str(_HERE / "elastic_cluster.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as cluster:
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        assert cluster.stdout.readline() == "ready\n"

        def run(
            workers: int,
            *arguments: Any,
            limit: float = 150,
            script: str = "elastic_train.py",
            restarts: dict[int, int] | None = None,
            **environment: str,
        ) -> list[dict[str, Any]]:
            job = {
                "workers": workers,
                "arguments": list(map(str, arguments)),
                "limit": limit,
                "script": script,
                "restarts": restarts or {},
                "environment": environment,
            }
            assert cluster.stdin is not None
            assert cluster.stdout is not None
            cluster.stdin.write(json.dumps(job) + "\n")
            cluster.stdin.flush()
            ended: list[dict[str, Any]] = json.loads(cluster.stdout.readline())
            for worker in ended:
                lines = [line for line in worker["output"].splitlines() if line.startswith("result ")]
                worker["result"] = json.loads(lines[0].removeprefix("result ")) if lines else None
            return ended

        try:
            yield run
        finally:
            cluster.stdin.close()
            try:
                cluster.wait(30)
            except subprocess.TimeoutExpired:
                cluster.kill()
