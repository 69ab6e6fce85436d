"""Clusters of real processes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.network import free_ports

ZYGOTE = Path(__file__).with_name("zygote.py")
LEFT_OUT = ("RANK", "WORLD_SIZE", "TF_CONFIG", "TFSTYLE_PS_KEYS")


class Zygote:
    """A process that starts tasks."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in LEFT_OUT} | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(ZYGOTE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def call(self, **message: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=20)


class Cluster:
    """Tasks, the strategy and the coordinator; ``kill``, ``stop`` and ``start`` act on one task."""

    def __init__(
        self,
        zygote: Zygote,
        log: Path,
        workers: int,
        ps: int,
        partitioner: Any = None,
        env: dict[str, str] | None = None,
        memory: dict[str, int] | None = None,
        start: bool = True,
        coordinator: bool = True,
        **options: Any,
    ) -> None:
        self._zygote, self._log, self._env, self._memory = zygote, log, env or {}, memory or {}
        addresses = [f"127.0.0.1:{port}" for port in free_ports(workers + ps + 1)]
        self.spec = {"worker": addresses[:workers], "ps": addresses[workers:-1], "chief": addresses[-1:]}
        self.pids: dict[tuple[str, int], int] = {}
        if start:
            for job in ("ps", "worker"):
                for index in range(len(self.spec[job])):
                    self.start(job, index)
        self.strategy: Any = None
        if coordinator:
            self.make_coordinator(partitioner, **options)

    def make_coordinator(self, partitioner: Any = None, **options: Any) -> None:
        resolver = td.cluster_resolver.SimpleClusterResolver(td.cluster_resolver.ClusterSpec(self.spec), "", "chief", 0)
        self.strategy = td.ParameterServerStrategy(resolver, variable_partitioner=partitioner, **options)
        self.coordinator = td.coordinator.ClusterCoordinator(self.strategy)

    def await_workers(self) -> None:
        """From now on every worker takes part: without this the first ones that are there may do all the work."""
        for index in range(len(self.spec["worker"])):
            self.coordinator.schedule(time.time, worker=index)
        self.coordinator.join(timeout=30)

    def add_three_times(self, count: int) -> torch.Tensor:
        """The value of a variable of so many zeros after a worker has added one to each three times."""
        with self.strategy.scope():
            value = td.Variable(torch.zeros(count))

        def add() -> None:
            value.assign_add(torch.ones(count))

        for _ in range(3):
            self.coordinator.schedule(add)
        self.coordinator.join(timeout=30)
        return value.value()

    def start(self, job: str, index: int) -> None:
        self.pids[job, index] = self._zygote.call(
            op="start", spec=self.spec, job=job, index=index, env=self._env, memory=self._memory.get(job),
            log=str(self._log),
        )  # fmt: skip

    def signal(self, job: str, index: int, number: int) -> None:
        os.kill(self.pids[job, index], number)

    def kill(self, job: str, index: int) -> None:
        self.signal(job, index, signal.SIGKILL)
        self.wait(job, index)

    @contextlib.contextmanager
    def random_kills(self, counts: dict[str, int], seconds: float, seed: int, progress: int) -> Iterator[list[int]]:
        """Kills and starts one of the first tasks of these jobs again and again; counts how often.

        On a busy machine tasks may need longer to start than they are given: so many functions finish between every
        third kill and the next one.
        """
        over, kills, chance = threading.Event(), [0], random.Random(seed)

        def killer() -> None:
            wanted = 0
            while not over.wait(seconds):
                if kills[0] % 3 == 0:
                    finished = self.coordinator.statistics().finished
                    if finished < wanted:
                        continue
                    wanted = finished + progress
                job = chance.choice(sorted(counts))
                index = chance.randrange(counts[job])
                self.kill(job, index)
                self.start(job, index)
                kills[0] += 1

        thread = threading.Thread(target=killer)
        thread.start()
        try:
            yield kills
        finally:
            over.set()
            thread.join()

    def wait(self, job: str, index: int, timeout: float = 20.0) -> int:
        """The exit code of a task that ends."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            code = self._zygote.call(op="wait", pid=self.pids[job, index])
            if code is not None:
                del self.pids[job, index]
                return int(code)
            time.sleep(0.01)
        raise TimeoutError(f"{job} {index} did not end within {timeout} s:\n{self.output()}")

    def statistics(self) -> list[dict[str, int]]:
        return self.strategy.servers.call_all({"method": "statistics"})

    def output(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def close(self) -> None:
        if self.strategy is not None:
            self.strategy.close()
        for job, index in list(self.pids):
            with contextlib.suppress(ProcessLookupError):
                self.signal(job, index, signal.SIGCONT)
                self.signal(job, index, signal.SIGKILL)
            self.wait(job, index)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    # The first step of an optimizer in a process sets an environment variable of torch's.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def cluster(zygote: Zygote, no_leaks: None, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters, and ends them after the test."""
    made: list[Cluster] = []

    def make(workers: int = 1, ps: int = 1, **options: Any) -> Cluster:
        made.append(Cluster(zygote, tmp_path / "tasks.log", workers, ps, **options))
        return made[-1]

    threads = torch.get_num_threads()
    yield make
    torch.set_num_threads(threads)
    for entry in made:
        entry.close()
