"""Steps per second of parameter servers on this machine, for each lane, and TensorFlow's beside them.

    python benchmarks/parameter_server.py --tf-python /path/to/python-with-tensorflow
    python benchmarks/parameter_server.py --lanes shm --cases noop,dense1M --workers 4 --ps 2
    python benchmarks/parameter_server.py --cases kill,server_kill --out benchmarks/results/parameter_server.json

Lanes: shm (shared memory), tcp, zmq (ZeroMQ), tf (TensorFlow, in its own interpreter). Cases:
    noop       an empty function                                             (cost of scheduling)
    latency    one empty function at a time, schedule to fetch               (p50 and p99)
    dense1M    a function reads 1M float32 and subtracts as many             (pull + push + apply)
    dense16M   the same with 16M
    sgd1M, sgd16M    the same through an optimizer's step: the function makes gradients, the servers apply SGD
    many       200 variables of 10000 floats, all read and subtracted from
    rows       4096 random rows of a table of 1M x 64 read and subtracted from
    rows_fixed the same with rows that are drawn once
    rows_sgd   the same with a loss and an optimizer
    kill       1500 steps of dense1M; one worker is killed and started again after 3 s: longest time without a step
    server_kill   the server is killed: time until join() raises
With ``--out`` the results go into that file, which keeps those of other lanes and cases, and into a table beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scheduling import seconds_to_error, throughput

import tfstyle_dist as tfd
from tfstyle_dist.core.network import free_ports

TASK = "import json, sys, tfstyle_dist as t; t.Server(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])).join()"
MEGA = 1 << 20
ROWS = 4096
UNITS = {"latency": " (us, p50)", "kill": " (s, longest gap)", "server_kill": " (s to the error)"}
CASES = "noop,latency,dense1M,sgd1M,dense16M,sgd16M,many,rows,rows_fixed,rows_sgd"


class Cluster:
    """Worker and ps processes of this machine."""

    def __init__(self, workers: int, ps: int, lane: str) -> None:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(workers + ps)]
        self.spec = {"worker": addresses[:workers], "ps": addresses[workers:]}
        shared = "1" if lane == "shm" else "0"
        # Functions of these scripts travel by name when another script schedules them.
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        lanes = {"TFSTYLE_SHARED_MEMORY": shared, "TFSTYLE_PS_TCP": "0" if lane == "zmq" else "1"}
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **lanes, "PYTHONPATH": path}
        os.environ.update(lanes)
        self.tasks: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        for job in ("ps", "worker"):
            for index in range(len(self.spec[job])):
                self.start(job, index)

    def start(self, job: str, index: int) -> None:
        """Starts a task."""
        command = [sys.executable, "-c", TASK, json.dumps(self.spec), job, str(index)]
        self.tasks[job, index] = subprocess.Popen(command, env=self._environment)

    def kill(self, job: str, index: int) -> None:
        """Kills a task."""
        self.tasks[job, index].kill()
        self.tasks[job, index].wait()

    def close(self) -> None:
        """Kills all tasks."""
        for job, index in self.tasks:
            self.kill(job, index)


def nothing() -> None:
    return None


def latency(coordinator: Any) -> dict[str, float]:
    times = []
    for _ in range(400):
        begin = time.perf_counter()
        coordinator.schedule(nothing).fetch()
        times.append(1e6 * (time.perf_counter() - begin))
    times.sort()
    return {"p50_us": times[200], "p99_us": times[396]}


def dense(strategy: Any, size: int) -> Callable[[], Any]:
    shards = len(strategy.cluster["ps"])
    with strategy.scope():
        variables = [tfd.Variable(torch.zeros(size // shards)) for _ in range(shards)]

    def subtract() -> None:
        for v in variables:
            v.assign_sub(v * 1e-6)

    return subtract


def many(strategy: Any) -> Callable[[], Any]:
    with strategy.scope():
        variables = [tfd.Variable(torch.zeros(10_000)) for _ in range(200)]

    def subtract() -> None:
        for v in variables:
            v.assign_sub(v * 1e-6)

    return subtract


def sgd(strategy: Any, size: int) -> Callable[[], Any]:
    shards = len(strategy.cluster["ps"])
    with strategy.scope():
        module = torch.nn.ParameterList([torch.zeros(size // shards) for _ in range(shards)])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)

    def step() -> None:
        for p in module:
            p.grad = p.detach() * 1e-6
        optimizer.step()

    return step


def rows(strategy: Any, kind: str) -> Callable[[], Any]:
    # One table for each server, as TensorFlow's program has.
    shards = len(strategy.cluster["ps"])
    count, drawn = MEGA // shards, ROWS // shards
    tables = [strategy.embedding(count, 64) for _ in range(shards)]
    weights = [t.weight for t in tables]
    fixed = torch.randint(0, count, (drawn,), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(weights, lr=1e-3)

    def subtract() -> None:
        numbers = fixed if kind == "rows_fixed" else torch.randint(0, count, (drawn,))
        for table in weights:
            with torch.no_grad():
                values = table[numbers] * 1e-3 + 1e-3
            table.scatter_sub(torch.sparse_coo_tensor(numbers[None], values, table.shape, check_invariants=False))

    def step() -> None:
        numbers = torch.randint(0, count, (drawn,))
        optimizer.zero_grad()
        sum((table(numbers) + 1).square().sum() for table in tables).backward()
        optimizer.step()

    return step if kind == "rows_sgd" else subtract


def worker_kill(strategy: Any, coordinator: Any, cluster: Cluster) -> dict[str, float]:
    with strategy.scope():
        value, count = tfd.Variable(torch.zeros(MEGA)), tfd.Variable(torch.tensor(0))

    def step() -> None:
        value.assign_sub(value * 1e-6)
        count.assign_add(1)

    for _ in range(20):
        coordinator.schedule(step)
    coordinator.join()

    def run() -> None:
        for _ in range(1500):
            coordinator.schedule(step)
        coordinator.join()

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.3)
    cluster.kill("worker", 0)
    killed = last_change = time.perf_counter()
    last, longest, restarted = int(count.numpy()), 0.0, False
    while thread.is_alive():
        now, seen = time.perf_counter(), int(count.numpy())
        if seen != last:
            longest, last, last_change = max(longest, now - last_change), seen, now
        if not restarted and now - killed > 3:
            cluster.start("worker", 0)
            restarted = True
        time.sleep(0.005)
    return {"longest_gap_s": longest, "steps_applied": int(count.numpy()) - 20, "steps_scheduled": 1500}


def measure(strategy: Any, coordinator: Any, cluster: Cluster, case: str, seconds: float) -> dict[str, Any]:
    if case == "latency":
        return latency(coordinator)
    if case == "kill":
        return worker_kill(strategy, coordinator, cluster)
    if case == "server_kill":
        return seconds_to_error(coordinator, dense(strategy, MEGA), lambda: cluster.kill("ps", 0))
    size = int("".join(filter(str.isdigit, case))) * MEGA if case.endswith("M") else 0
    if case == "noop":
        fn: Callable[[], Any] = nothing
    elif case == "many":
        fn = many(strategy)
    elif case.startswith("rows"):
        fn = rows(strategy, case)
    else:
        fn = (sgd if case.startswith("sgd") else dense)(strategy, size)
    rate = throughput(coordinator, fn, len(cluster.spec["worker"]), seconds)
    result = {"per_s": rate}
    if size:
        result["GB_per_s"] = rate * 8 * size / 1e9
    if case.startswith("rows"):
        result["rows_per_s"] = rate * ROWS
    return result


def ours(lane: str, cases: list[str], workers: int, ps: int, seconds: float) -> dict[str, Any]:
    cluster, results = Cluster(workers, ps, lane), {}
    try:
        resolver = tfd.cluster_resolver.SimpleClusterResolver(tfd.cluster_resolver.ClusterSpec(cluster.spec))
        with tfd.ParameterServerStrategy(resolver) as strategy:
            coordinator = tfd.coordinator.ClusterCoordinator(strategy)
            coordinator.schedule(nothing).fetch()
            for case in cases:
                results[case] = measure(strategy, coordinator, cluster, case, seconds)
                print(lane, case, results[case], file=sys.stderr, flush=True)
    finally:
        cluster.close()
    return results


def tensorflow(python: str, cases: list[str], workers: int, ps: int, seconds: float) -> dict[str, Any]:
    script = Path(__file__).with_name("parameter_server_tf.py")
    options = ["--workers", str(workers), "--ps", str(ps), "--cases", ",".join(cases), "--seconds", str(seconds)]
    found = subprocess.run([python, str(script), *options], stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    results: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    for case, result in results.items():
        print("tf", case, result, file=sys.stderr, flush=True)
    return results


def figure(result: dict[str, Any]) -> float:
    """The number of a case: per second, or microseconds or seconds that something takes."""
    for name in ("per_s", "p50_us", "longest_gap_s", "seconds_to_error"):
        if name in result:
            return float(result[name])
    raise KeyError(f"no figure among {sorted(result)}")


def table(report: dict[str, Any]) -> str:
    lanes = report["lanes"]
    names = [lane for lane in ("shm", "tcp", "zmq", "tf") if lane in lanes]
    heads = [*names, *(f"{lane} over tf" for lane in names if lane != "tf" and "tf" in lanes)]
    lines = [report["machine"], "", "| case | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    cases = dict.fromkeys(case for lane in names for case in lanes[lane])
    for case in cases:
        values = {lane: figure(lanes[lane][case]) for lane in names if case in lanes[lane]}
        shown = [f"{values[lane]:.4g}" if lane in values else "-" for lane in names]
        for lane in names:
            if lane != "tf" and "tf" in lanes:
                both = lane in values and "tf" in values
                shown.append(f"{values[lane] / values['tf']:.2f}" if both else "-")
        lines.append(f"| {case}{UNITS.get(case, '/s')} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--lanes", default="shm,tcp,zmq,tf", help="tf is left out where TensorFlow is not at hand")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case")
    parser.add_argument("--tf-python", help="an interpreter that has tensorflow; default: this one, if it has")
    parser.add_argument("--out", type=Path, help="a JSON file; a table goes beside it")
    options = parser.parse_args()
    python = options.tf_python or (sys.executable if importlib.util.find_spec("tensorflow") else None)
    shape = f"{options.workers} workers, {options.ps} ps"
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {shape}"
    report: dict[str, Any] = {"machine": machine, "lanes": {}}
    if options.out and options.out.exists():
        report = json.loads(options.out.read_text())
    for lane in options.lanes.split(","):
        run = [options.cases.split(","), options.workers, options.ps, options.seconds]
        if lane == "tf" and python is None:
            continue
        found = tensorflow(python, *run) if lane == "tf" else ours(lane, *run)
        report["lanes"].setdefault(lane, {}).update(found)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
