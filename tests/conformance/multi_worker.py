"""n worker processes of a TF_CONFIG cluster on this host, for the recorded programs."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path

import tfstyle_dist as td
from tfstyle_dist.core import network

sys.path.insert(0, str(Path(__file__).parent))
import harness
from lib import util


def run(xp, n, fn, timeout, params):
    """What ``fn(xp, strategy, index, **params)`` returns in each of ``n`` processes."""
    addresses = [f"127.0.0.1:{port}" for port in network.free_ports(n)]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(n)]
    workers = [
        context.Process(target=_work, args=(xp, index, addresses, fn, params, pipes[index][1])) for index in range(n)
    ]
    for worker in workers:
        worker.start()
    for _, end in pipes:
        end.close()
    results = [_result(pipe, timeout) for pipe, _ in pipes]
    for worker in workers:
        worker.join(10)
        worker.kill()
    return results


def _result(pipe, timeout):
    try:
        return pipe.recv() if pipe.poll(timeout) else {"error": "WorkerTimeout", "message_contains": ""}
    except EOFError:
        return {"error": "WorkerDied", "message_contains": ""}


def _work(xp, index, addresses, fn, params, pipe):
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    try:
        with td.MultiWorkerMirroredStrategy() as strategy:
            pipe.send(harness.jsonable(fn(xp, strategy, index, **params)))
    except Exception as error:
        pipe.send(util.describe_error(error))
