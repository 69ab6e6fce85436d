"""A job of benchmarks/elastic.py: its workers, their faults, and what they commit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KINDS = ("plain", "elastic", "restart", "torchft")
"""What a job is: without ``elastic=``, with it, without it but with checkpoints, of torchft."""


def program_of(name: str) -> str:
    """A program beside this one."""
    return str(Path(__file__).with_name(f"{name}.py"))


class Job:
    """Workers, started again when they die.

    Args:
        workers: how many.
        seconds: of training.
        pad: seconds of sleep in a step.
        kind: see ``KINDS``.
        replicas: of an elastic one; as many as workers if not given.
        check_every: see ``Elastic``.
        suspect_after: see ``Elastic``.
        stopped_after: likewise; 0: it is not given.
        apart: whether each worker pretends to be on a host of its own.
        torchft: the Python of torchft's environment.
    """

    def __init__(
        self,
        workers: int,
        seconds: float,
        pad: float,
        kind: str = "elastic",
        replicas: int = 0,
        check_every: int = 0,
        suspect_after: float = 5.0,
        stopped_after: float = 0.0,
        apart: bool = False,
        torchft: str = "",
    ) -> None:
        from tfstyle_dist.core.network import free_ports

        self.folder = tempfile.TemporaryDirectory(prefix="tfstyle-elastic-")
        *ports, lighthouse = free_ports(workers + 1)
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        self._kind, self._torchft, self._apart = kind, torchft, apart
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._lighthouse_address = f"127.0.0.1:{lighthouse}"
        self._times: list[Any] = [seconds, pad]
        self._options: list[Any] = [kind, replicas or workers, check_every, suspect_after, stopped_after]
        if kind == "torchft":
            command = [os.path.join(os.path.dirname(torchft), "torchft_lighthouse"), "--min_replicas", "1"]
            command += ["--join_timeout_ms", "1000", "--bind", self._lighthouse_address]
            self._lighthouse = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.processes = [self._start(rank) for rank in range(workers)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        if self._kind == "torchft":
            command = [self._torchft, program_of("elastic_torchft"), self._log(rank), str(rank), *map(str, self._times)]
            environment = {"TORCHFT_LIGHTHOUSE": f"http://{self._lighthouse_address}"}
        else:
            cluster = {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": rank}}
            environment = {"TF_CONFIG": json.dumps(cluster)}
            environment |= {"TFSTYLE_HOST": f"pretended-{rank}"} if self._apart else {}
            command = [
                sys.executable,
                program_of("elastic_worker"),
                self._log(rank),
                *map(str, self._times + self._options),
            ]
        return subprocess.Popen(
            command,
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
            stdout=None if "SHOW" in os.environ else subprocess.DEVNULL,
            stderr=None if "SHOW" in os.environ else subprocess.DEVNULL,
        )

    def _log(self, rank: int) -> str:
        return os.path.join(self.folder.name, f"{rank}.log")

    def lines(self, rank: int) -> list[tuple[str, float, int]]:
        """What a worker wrote: what, when, and the number of its step."""
        if not os.path.exists(self._log(rank)):
            return []
        found = [line.split() for line in Path(self._log(rank)).read_text().splitlines()]
        return [(w[0], float(w[1]), int(w[2])) for w in found if len(w) == 3]

    def commits(self, rank: int) -> list[tuple[float, int]]:
        """Time and number of each step that a worker has committed."""
        return [(when, number) for what, when, number in self.lines(rank) if what == "commit"]

    def wait_for_commits(self, ranks: list[int], after: float, beyond: int = 0, limit: float = 300) -> list[float]:
        """The first commit of each after a point in time, of a step with a higher number."""
        end = time.time() + limit
        while time.time() < end:
            firsts = [next((t for t, n in self.commits(r)[-2000:] if t > after and n > beyond), None) for r in ranks]
            if all(first is not None for first in firsts):
                return [first for first in firsts if first is not None]
            if any(process.poll() not in (None, 0, -signal.SIGKILL) for process in self.processes):
                raise RuntimeError("a worker ended with an error; SHOW=1 shows it")
            time.sleep(0.005)
        raise TimeoutError(f"no commit of {ranks} within {limit} s")

    def kill(self, rank: int) -> float:
        """Returns the time."""
        self.processes[rank].kill()
        now = time.time()
        self.processes[rank].wait()
        return now

    def restart(self, rank: int) -> float:
        """Returns the time."""
        self.processes[rank] = self._start(rank)
        return time.time()

    def restart_all(self) -> None:
        """Once the others have noticed by themselves that one is gone."""
        for process in self.processes:
            process.wait(120)
        self.processes = [self._start(rank) for rank in range(len(self.processes))]

    def restart_the_dead(self) -> None:
        """Of those that did not come to the end."""
        for rank, process in enumerate(self.processes):
            if process.poll() not in (None, 0):
                self.restart(rank)

    def close(self) -> None:
        """Ends all."""
        for process in [*self.processes, *([] if self._lighthouse is None else [self._lighthouse])]:
            process.kill()
            process.wait()
        self.folder.cleanup()
