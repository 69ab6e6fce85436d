"""Starts the workers of an elastic test as forks of one process that has imported torch, and tells what came of them.

Reads one JSON line on its standard input for each job: {"workers": N, "arguments": [...], "environment": {...},
"limit": seconds, "restarts": {worker: how often it is started again}}; answers with one JSON line: a list of
{"code": ..., "output": ...}.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import elastic_train  # also loads what the workers need, once
import torch

from tfstyle_dist.core.network import free_ports

_HERE = Path(__file__).parent


def warm_up() -> None:
    """What torch loads at the first step of an optimizer."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()
    import tfstyle_dist.strategies.elastic  # noqa: F401


def work(index: int, life: int, addresses: list[str], job: dict[str, Any], output: Path) -> None:
    """What a worker's process does; does not return."""
    code = 1
    try:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        faulthandler.register(signal.SIGUSR1)
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        os.environ.update({"TF_CONFIG": json.dumps(cluster), "LIFE": str(life), **job.get("environment", {})})
        script = _HERE / job.get("script", "elastic_train.py")
        sys.argv = [str(script), *job["arguments"]]
        if script.stem == "elastic_train":
            elastic_train.main()
        else:
            runpy.run_path(str(script), run_name="__main__")
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a job to its end, or kills it at the limit, after its stacks were printed."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(job["workers"])]
    with tempfile.TemporaryDirectory() as folder:
        ended = Path(folder) / "ended"
        outputs = [Path(folder) / str(index) for index in range(job["workers"])]

        def start(index: int, life: int) -> int:
            pid = os.fork()
            if pid == 0:
                os.environ["TFSTYLE_JOB_ENDED_FILE"] = str(ended)
                work(index, life, addresses, job, outputs[index])
            return pid

        pids = {start(index, 0): index for index in range(job["workers"])}
        codes = wait(pids, time.monotonic() + job.get("limit", 120), job.get("restarts", {}), start, ended)
        return [{"code": codes[i], "output": outputs[i].read_text()} for i in range(len(outputs))]


def wait(
    pids: dict[int, int], end: float, restarts: dict[str, int], start: Callable[[int, int], int], ended: Path
) -> dict[int, int]:
    """The exit codes by worker; minus the signal for the killed. Says when one has ended, as the launcher does."""
    codes: dict[int, int] = {}
    lives = dict.fromkeys(pids.values(), 0)
    while len(codes) < len(pids):
        for pid, index in list(pids.items()):
            if index in codes or not (found := os.waitpid(pid, os.WNOHANG))[0]:
                continue
            code = os.waitstatus_to_exitcode(found[1])
            if code and lives[index] < restarts.get(str(index), 0) and time.monotonic() < end:
                lives[index] += 1
                del pids[pid]
                pids[start(index, lives[index])] = index
            else:
                codes[index] = code
                if code == 0:
                    ended.touch()
        if time.monotonic() > end:
            hung = [pid for pid, index in pids.items() if index not in codes]
            for pid in hung:
                os.kill(pid, signal.SIGUSR1)  # its stacks go to its output
            time.sleep(1)
            for pid in hung:
                os.kill(pid, signal.SIGKILL)
            end += 10
        time.sleep(0.01)
    return codes


def main() -> None:
    torch.set_num_threads(1)
    warm_up()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
