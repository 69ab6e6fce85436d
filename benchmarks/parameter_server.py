"""Steps per second of parameter servers on this machine, for each lane.

    python benchmarks/parameter_server.py --workers 2 --ps 1 --lanes shm,zmq --seconds 3

Cases
    noop      an empty function                                             (cost of scheduling)
    latency   one empty function at a time, schedule to fetch               (p50 and p99)
    dense1M   a function reads 1M float32 and subtracts as many             (pull + push + apply)
    dense16M  the same with 16M
    many      200 variables of 10000 floats, all read and subtracted from
    rows      4096 random rows of a table of 1M x 64 read and subtracted from
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import tfstyle_dist as tfd

TASK = "import json, sys, tfstyle_dist as t; t.Server(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])).join()"
MEGA = 1 << 20


def start(workers: int, ps: int, lane: str) -> tuple[dict[str, list[str]], list[subprocess.Popen[bytes]]]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers + ps)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    cluster = {"worker": addresses[:workers], "ps": addresses[workers:]}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TFSTYLE_SHARED_MEMORY": "1" if lane == "shm" else "0"}
    tasks = [
        subprocess.Popen([sys.executable, "-c", TASK, json.dumps(cluster), job, str(index)], env=environment)
        for job in ("ps", "worker")
        for index in range(len(cluster[job]))
    ]
    return cluster, tasks


def throughput(coordinator: Any, fn: Callable[[], Any], workers: int, seconds: float) -> float:
    def run(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            coordinator.schedule(fn)
        coordinator.join()
        return count / (time.perf_counter() - begin)

    run(4 * workers)
    count = max(10, int(run(4 * workers) * seconds / 3))
    return statistics.median(run(count) for _ in range(3))


def cases(strategy: Any, coordinator: Any, workers: int, seconds: float, wanted: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}

    def nothing() -> None:
        return None

    for name in wanted:
        if name == "noop":
            results[name] = {"per_s": throughput(coordinator, nothing, workers, seconds)}
        elif name == "latency":
            times = []
            for _ in range(300):
                begin = time.perf_counter()
                coordinator.schedule(nothing).fetch()
                times.append(1e6 * (time.perf_counter() - begin))
            times.sort()
            results[name] = {"p50_us": times[150], "p99_us": times[297]}
        elif name.startswith("dense"):
            size = int(name[5:-1]) * MEGA
            shards = len(strategy.cluster["ps"])
            with strategy.scope():
                dense = [tfd.Variable(torch.zeros(size // shards)) for _ in range(shards)]

            def subtract(variables: list[Any] = dense) -> None:
                for v in variables:
                    v.assign_sub(v.value() * 1e-6)

            rate = throughput(coordinator, subtract, workers, seconds)
            results[name] = {"per_s": rate, "GB_per_s": rate * 8 * size / 1e9}
        elif name == "many":
            with strategy.scope():
                many = [tfd.Variable(torch.zeros(10_000)) for _ in range(200)]

            def subtract_many(variables: list[Any] = many) -> None:
                for v in variables:
                    v.assign_sub(v.value() * 1e-6)

            results[name] = {"per_s": throughput(coordinator, subtract_many, workers, seconds)}
        elif name == "rows":
            table = strategy.embedding(MEGA, 64).weight

            def rows(table: Any = table) -> None:
                numbers = torch.randint(0, MEGA, (4096,))
                with torch.no_grad():
                    values = table[numbers] * 1e-3 + 1e-3
                table.scatter_sub(torch.sparse_coo_tensor(numbers[None], values, table.shape, check_invariants=False))

            rate = throughput(coordinator, rows, workers, seconds)
            results[name] = {"per_s": rate, "rows_per_s": rate * 4096}
        print(name, results[name], file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--lanes", default="shm,zmq")
    parser.add_argument("--cases", default="noop,latency,dense1M,dense16M,many,rows")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    report: dict[str, Any] = {"workers": options.workers, "ps": options.ps, "torch": torch.__version__, "lanes": {}}
    for lane in options.lanes.split(","):
        cluster, tasks = start(options.workers, options.ps, lane)
        try:
            resolver = tfd.cluster_resolver.SimpleClusterResolver(tfd.cluster_resolver.ClusterSpec(cluster))
            with tfd.ParameterServerStrategy(resolver) as strategy:
                coordinator = tfd.coordinator.ClusterCoordinator(strategy)
                wanted = options.cases.split(",")
                report["lanes"][lane] = cases(strategy, coordinator, options.workers, options.seconds, wanted)
        finally:
            for task in tasks:
                task.kill()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
