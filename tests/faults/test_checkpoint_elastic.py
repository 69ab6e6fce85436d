"""Hosts go and come under torchrun: no sample is lost or trained on twice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfstyle_dist.core.launch_env import LAUNCHER_VARIABLES
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.testing import processes

JOB = Path(__file__).parent / "elastic_job.py"


class Hosts:
    """Agents of torchrun, each with one worker, that stand for hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.agents = folder, free_ports(1)[0], {}
        self.limit(0)

    def limit(self, step: int) -> None:
        """Holds the training at a step."""
        new = self.folder / "limit.new"
        new.write_text(str(step))
        new.replace(self.folder / "limit")

    def start(self, host: int) -> None:
        # The first one holds what the agents know of each other, and must stay.
        timing = f"is_host={int(host == 0)},last_call_timeout=2,join_timeout=90,"
        timing += "keep_alive_interval=1,keep_alive_max_attempt=10"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1"]
        command += ["--max-restarts=9", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}"]
        command += ["--rdzv-id=elastic", f"--rdzv-conf={timing}", "--monitor-interval=0.1", "--local-addr=127.0.0.1"]
        environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
        environment |= {"OMP_NUM_THREADS": "1", "TFSTYLE_TIMEOUT_SECONDS": "40", "HOST": str(host)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TFSTYLE_TESTING_ELASTIC": str(self.folder)}
        # With a shared store torch 2.13 does not tell a host that comes later where worker 0 is.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with (self.folder / f"host{host}.out").open("a") as output:
            self.agents[host] = subprocess.Popen(
                [*command, str(JOB), str(self.folder)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
            )  # fmt: skip

    def log(self, host: int) -> list[dict[str, int]]:
        path = self.folder / f"host{host}.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, host: int, workers: int, step: int) -> dict[str, int]:
        end = time.monotonic() + 90
        while time.monotonic() < end:
            for entry in self.log(host):
                if entry["workers"] == workers and entry["step"] == step:
                    return entry
            dead = {h: a.returncode for h, a in self.agents.items() if a.poll() not in (None, 0)}
            assert not dead, f"agents ended with {dead}\n{self.output()}"
            time.sleep(0.05)
        pytest.fail(f"host {host} did not come to step {step} with {workers} workers\n{self.output()}")

    def kill(self, host: int) -> None:
        """The whole host at once."""
        worker = self.log(host)[-1]["pid"]
        agent = self.agents.pop(host)
        for pid in (agent.pid, worker):
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def output(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(self.folder.glob("*.out")))

    def close(self) -> None:
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                agent.kill()
            agent.wait()
        processes.kill_with_environment("TFSTYLE_TESTING_ELASTIC", str(self.folder))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    started = Hosts(tmp_path)
    yield started
    started.close()


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_three_hosts_then_two_then_three(hosts: Hosts) -> None:
    hosts.limit(7)
    for host in range(3):
        hosts.start(host)
    for host in range(3):
        hosts.wait_for(host, workers=3, step=7)  # of 10 in the first epoch; saved was step 6
    before = len(hosts.log(0))  # also of two, if the third came late
    hosts.kill(2)
    hosts.limit(17)
    for host in range(2):
        hosts.wait_for(host, workers=2, step=17)
    hosts.start(2)  # the agents end their workers and begin anew with three
    for host in range(3):
        hosts.wait_for(host, workers=3, step=17)
    hosts.limit(10**6)
    assert [hosts.agents[host].wait(60) for host in range(3)] == [0, 0, 0], hosts.output()
    output = hosts.output()
    assert "samples seen 3 to 3 times in 3 epochs" in output, output
    assert "weights finite and equal on 3 replica(s): True" in output, output
    ran = [(entry["workers"], entry["step"]) for entry in hosts.log(0)]
    first_of_two = min(step for workers, step in ran[before:] if workers == 2)
    assert first_of_two in (4, 7)  # after the checkpoint of step 3 or 6, whichever was complete
    assert len(ran) > 30  # steps after the last checkpoint were made again, and count once
