"""Sums between the ranks of one host, 1 KB to 256 MB: ADD_N, TREE and DEFAULT next to Gloo's all-reduce.

    python benchmarks/allreduce.py --out benchmarks/results/allreduce.json
    python benchmarks/allreduce.py --ranks 2 --sizes 1024 1048576 --sockets

All forms take turns in the same processes, so that a busy machine disturbs them alike; what is printed is the median
time and the median of the round-by-round ratios of Gloo's time to ours. All ranks start together, after a meeting in
shared memory: they leave Gloo's barrier at times that differ by more than a small sum takes. ``--sockets`` keeps ours
out of shared memory, ``--interpreted`` does without the compiled sums, which else are compiled before anything is
timed. The results of all forms are compared with each other first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES = [1 << k for k in (10, 12, 14, 16, 18, 20, 22, 24, 26, 28)]
FORMS = ("gloo", "ADD_N", "TREE", "DEFAULT")


def forms_of(group: Any) -> dict[str, Callable[[torch.Tensor], object]]:
    import tfstyle_dist as td

    method = td.AggregationMethod
    return {
        "gloo": dist.all_reduce,
        "ADD_N": lambda buffer: group.all_reduce(buffer, "benchmark", method.ADD_N),
        "TREE": lambda buffer: group.all_reduce(buffer, "benchmark", method.TREE),
        "DEFAULT": lambda buffer: group.all_reduce(buffer, "benchmark", method.DEFAULT),
    }


def measure(sizes: list[int], seconds: float, compiled: bool) -> list[dict[str, Any]]:
    """Seconds of every form in every round, the slowest rank's, for each size."""
    import tfstyle_dist as td
    from tfstyle_dist_kernels.cpu import cpu_exchange

    torch.set_num_threads(1)
    if compiled and cpu_exchange.unavailable() is None:
        for order in ("add_n", "tree"):
            cpu_exchange.prepare(torch.float32, int(os.environ["WORLD_SIZE"]), order)
    results = []
    with td.MirroredStrategy() as strategy:
        group: Any = strategy.worker.group
        forms = forms_of(group)
        for nbytes in sizes:
            values = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(group.rank))
            sums = {}
            for form, function in forms.items():
                sums[form] = values.clone()
                function(sums[form])
                torch.testing.assert_close(sums[form], sums["gloo"], rtol=1e-5, atol=1e-5)
            begin = time.perf_counter()
            forms["gloo"](values.clone())
            rounds = max(8, min(200, int(seconds / (len(forms) * 2 * (time.perf_counter() - begin)))))
            count = torch.tensor([rounds])
            dist.broadcast(count, 0)
            own = torch.empty(int(count), len(forms), dtype=torch.float64)
            buffer, functions = torch.empty_like(values), list(forms.values())
            for number in range(int(count)):
                turn = number % len(forms)  # rotated: what follows Gloo meets its threads, still at work
                for place in (*range(turn, len(forms)), *range(turn)):
                    buffer.copy_(values)
                    dist.barrier()
                    group.numbers(0, "start")
                    begin = time.perf_counter()
                    functions[place](buffer)
                    own[number, place] = time.perf_counter() - begin
            dist.all_reduce(own, dist.ReduceOp.MAX)
            times = {form: own[:, place].tolist() for place, form in enumerate(forms)}
            routes = {f: group.explain(nbytes // 4, torch.float32, getattr(td.AggregationMethod, f)) for f in FORMS[1:]}
            results.append({"bytes": nbytes, "seconds": times, "routes": routes})
    return results


def launch(ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "seconds"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        command += ["--write", str(out), "--seconds", str(options.seconds), "--sizes", *map(str, options.sizes)]
        command += ["--interpreted"] * options.interpreted
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TFSTYLE_SHARED_MEMORY": str(int(not options.sockets))}
        subprocess.run(command, check=True, env=environment, timeout=3000)
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def quantiles(times: list[float]) -> list[float]:
    """20 %, 50 % and 80 % of the rounds are below these."""
    return [sorted(times)[int(len(times) * part)] for part in (0.2, 0.5, 0.8)]


def show(ranks: int, results: list[dict[str, Any]]) -> None:
    print(f"\n{ranks} ranks: median time, and speed over Gloo's all-reduce (median over the rounds)")
    print("| size | Gloo | ADD_N | TREE | DEFAULT |\n|---|---|---|---|---|")
    for result in results:
        times = result["seconds"]
        cells = [f"{statistics.median(times['gloo']) * 1e6:.0f} us"]
        for form in FORMS[1:]:
            ratio = statistics.median(g / s for g, s in zip(times["gloo"], times[form], strict=True))
            result.setdefault("over_gloo", {})[form] = round(ratio, 3)
            cells.append(f"{statistics.median(times[form]) * 1e6:.0f} us, {ratio:.2f} x")
        result["seconds"] = {form: [float(f"{s:.4g}") for s in quantiles(times[form])] for form in FORMS}
        size = f"{result['bytes'] >> 10} KB" if result["bytes"] < 1 << 20 else f"{result['bytes'] >> 20} MB"
        print(f"| {size} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--seconds", type=float, default=4.0, help="about how long each size is measured")
    parser.add_argument("--sockets", action="store_true", help="without shared memory")
    parser.add_argument("--interpreted", action="store_true", help="without compiled sums")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        results = measure(options.sizes, options.seconds, not options.interpreted)
        if int(os.environ["RANK"]) == 0:
            options.write.write_text(json.dumps(results))
        return
    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {cores} cores")
    everything: dict[str, Any] = {"torch": torch.__version__, "cores": cores, "sockets": options.sockets, "ranks": {}}
    for ranks in options.ranks:
        results = launch(ranks, options)
        show(ranks, results)
        everything["ranks"][ranks] = results
    if options.out:
        options.out.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
