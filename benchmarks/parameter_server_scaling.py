"""Steps per second of parameter servers with 1 to 8 workers and 1 to 4 servers, and what a step costs each task.

    python benchmarks/parameter_server_scaling.py --out benchmarks/results/parameter_server_scaling.json

A step pulls 1M float32, multiplies them, and subtracts the result; the variables are spread evenly over the servers.
All tasks share this machine's cores, so the sum of the costs, not the number of workers, bounds the rate here. The
costs (CPU time of a task for each step) at three sizes calibrate ``parameter_server_simulation.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from parameter_server import Cluster, dense, nothing

import tfstyle_dist as tfd

SHAPES = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (8, 4)]
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def run(lane: str, workers: int, ps: int, sizes: list[int], seconds: float) -> list[dict[str, Any]]:
    """One row for each size, in floats."""
    cluster, rows = Cluster(workers, ps, lane), []
    try:
        resolver = tfd.cluster_resolver.SimpleClusterResolver(tfd.cluster_resolver.ClusterSpec(cluster.spec))
        with tfd.ParameterServerStrategy(resolver) as strategy:
            coordinator = tfd.coordinator.ClusterCoordinator(strategy)
            for index in range(workers):
                coordinator.schedule(nothing, worker=index)  # all are there
            coordinator.join()
            for size in sizes:
                fn = dense(strategy, size)

                def steps(count: int, fn: Any = fn) -> float:
                    begin = time.perf_counter()
                    for _ in range(count):
                        coordinator.schedule(fn)
                    coordinator.join()
                    return time.perf_counter() - begin

                steps(4 * workers)
                count = max(20, int(8 * workers / steps(8 * workers) * seconds))
                counts = (("ps", ps), ("worker", workers))
                groups = {job: [cluster.tasks[job, i].pid for i in range(n)] for job, n in counts}
                groups["chief"] = [os.getpid()]
                before = {job: sum(map(cpu_seconds, pids)) for job, pids in groups.items()}
                rate = count / steps(count)
                after = {job: sum(map(cpu_seconds, pids)) for job, pids in groups.items()}
                spent = {job: 1e3 * (after[job] - before[job]) / count for job in groups}
                rows.append(
                    {"lane": lane, "workers": workers, "ps": ps, "floats": size, "per_s": rate, "cpu_ms": spent}
                )
                print(rows[-1], file=sys.stderr, flush=True)
    finally:
        cluster.close()
    return rows


def table(report: dict[str, Any]) -> str:
    lines = [
        report["machine"],
        "",
        "| lane | workers | servers | floats | steps/s | CPU ms of a step: servers | workers | chief |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in report["rows"]:
        costs = " | ".join(f"{row['cpu_ms'][job]:.2f}" for job in ("ps", "worker", "chief"))
        lines.append(
            f"| {row['lane']} | {row['workers']} | {row['ps']} | {row['floats']} | {row['per_s']:.1f} | {costs} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanes", default="shm,tcp,zmq")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores for all tasks"
    report: dict[str, Any] = {"machine": machine, "rows": []}
    for lane in options.lanes.split(","):
        for workers, ps in SHAPES:
            sizes = [1 << 10, 1 << 20, 1 << 22] if (workers, ps) == (2, 1) else [1 << 20]
            report["rows"] += run(lane, workers, ps, sizes, options.seconds)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
