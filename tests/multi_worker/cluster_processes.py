"""TF_CONFIG clusters of fresh processes on this host, each task with its own loopback address."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import started_together

from tfstyle_dist.core import launch_env, network

LAUNCHER_VARIABLES = (*launch_env.LAUNCHER_VARIABLES, "TF_CONFIG")


def clean_environment(**changes: str) -> dict[str, str]:
    """This environment without a launcher's variables."""
    return started_together.clean_environment(**{"TFSTYLE_TIMEOUT_SECONDS": "20", **changes})


def loopback_cluster(workers: int) -> dict[str, list[str]]:
    """Workers at 127.0.0.2, 127.0.0.3, ...: several hosts, as far as addresses go."""
    ports = network.free_ports(workers)
    return {"worker": [f"127.0.0.{2 + index}:{port}" for index, port in enumerate(ports)]}


class Tasks:
    """Processes of a cluster, all gone when the ``with`` block ends.

    Args:
        program: the script that each runs.
        cluster: the cluster.
        environment: more environment variables.

    Attributes:
        prefix: put before the command of tasks that are started from now on.
    """

    def __init__(self, program: Path, cluster: Mapping[str, Sequence[str]], **environment: str) -> None:
        self.program, self.cluster, self.environment = program, cluster, environment
        self.prefix: list[str] = []
        self.processes: dict[tuple[str, int], subprocess.Popen[str]] = {}
        self.output: dict[tuple[str, int], str] = {}

    def __enter__(self) -> Tasks:
        return self

    def start(self, *indices: int, job: str = "worker", arguments: Sequence[str] = (), **changes: Any) -> None:
        """Starts tasks; ``changes`` replaces parts of their TF_CONFIG."""
        for index in indices:
            config = {"cluster": self.cluster, "task": {"type": job, "index": index}} | changes
            self.processes[job, index] = subprocess.Popen(
                [*self.prefix, sys.executable, "-u", str(self.program), *arguments],
                env=clean_environment(TF_CONFIG=json.dumps(config), **self.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def wait_for(self, text: str, index: int, job: str = "worker") -> None:
        """Reads a task's output until it says something."""
        stream = self.processes[job, index].stdout
        assert stream is not None
        read = ""
        while text not in read:
            line = stream.readline()
            assert line, f"{job} {index} ended without saying {text!r}:\n{read}"
            read += line
        self.output[job, index] = self.output.get((job, index), "") + read

    def send(self, number: signal.Signals, index: int, job: str = "worker") -> None:
        """Sends a signal to one task."""
        self.processes[job, index].send_signal(number)

    def end(self, index: int, job: str = "worker", timeout: float = 60) -> tuple[int, str]:
        """Waits for a task; its exit code and all of its output."""
        process = self.processes[job, index]
        rest, _ = process.communicate(timeout=timeout)
        return process.returncode, self.output.get((job, index), "") + rest

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()
