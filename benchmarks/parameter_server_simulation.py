"""How many workers parameter servers keep busy: a simulation of 100 to 1000 workers with measured costs.

    python benchmarks/parameter_server_simulation.py --out benchmarks/results/parameter_server_simulation.json

A worker asks the coordinator, pulls from all servers, computes, pushes to all servers, and asks again. The coordinator,
each server's core and each direction of each server's network link serve one request at a time in the order of
arrival. Costs come from ``results/parameter_server_scaling.json`` (CPU time of a step of 2 workers and 1 server over
TCP at three sizes, a straight line through them, half of it for the pull and half for the push); the network and
the time a worker computes (with a spread of 10 %) are given. A server is taken to have one core, although its threads
use several. Beside the result stands what the sizing formula of docs/parameter_server.md says:

    steps/s = min(W / (compute + an idle system's pull and push),    workers
                  S / (c + d B / S),                                 servers' cores:  c per request pair, d per byte
                  S x link / B,                                      servers' links:  B bytes one way
                  1 / coordinator)                                   scheduling
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Costs:
    """Seconds.

    Attributes:
        coordinator: for each function.
        fixed: of a server's core, for one pull and one push.
        per_byte: of a server's core, for each byte pulled and pushed.
        worker: of a worker's core for each byte, besides the computation.
    """

    coordinator: float
    fixed: float
    per_byte: float
    worker: float

    @classmethod
    def measured(cls, path: Path, lane: str) -> Costs:
        """From the results of ``parameter_server_scaling.py``."""
        rows = json.loads(path.read_text())["rows"]
        rows = [r for r in rows if (r["lane"], r["workers"], r["ps"]) == (lane, 2, 1)]
        small, large = rows[0], rows[-1]
        spread = 4 * (large["floats"] - small["floats"])
        slopes = {job: 1e-3 * (large["cpu_ms"][job] - small["cpu_ms"][job]) / spread for job in ("ps", "worker")}
        fixed = 1e-3 * small["cpu_ms"]["ps"] - 4 * small["floats"] * slopes["ps"]
        return cls(1e-3 * small["cpu_ms"]["chief"], fixed, slopes["ps"], slopes["worker"])


class Queue:
    """Serves one request at a time."""

    def __init__(self) -> None:
        self.free, self.busy = 0.0, 0.0

    def serve(self, now: float, seconds: float) -> float:
        """When a request that comes now is done."""
        self.free = max(self.free, now) + seconds
        self.busy += seconds
        return self.free


def simulate(
    workers: int, servers: int, nbytes: float, compute: float, link: float, costs: Costs, seconds: float
) -> dict[str, float]:
    """Steps per second, and how busy the busiest of each kind is, after a first fifth that is not counted."""
    rng = random.Random(workers * 1000 + servers)
    coordinator = Queue()
    cores, out, into = ([Queue() for _ in range(servers)] for _ in range(3))
    share = nbytes / servers
    half = (costs.fixed + costs.per_byte * share) / 2
    numbers = itertools.count()
    events: list[tuple[float, int, str, int, int]] = []
    left = [0] * workers  # servers that a worker still waits for
    steps = 0

    def at(time: float, what: str, worker: int, server: int = 0) -> None:
        heapq.heappush(events, (time, next(numbers), what, worker, server))

    for worker in range(workers):
        at(rng.random() * compute, "ask", worker)
    warm = seconds / 5
    while events:
        now, _, what, worker, server = heapq.heappop(events)
        if now > seconds:
            break
        if what == "ask":
            at(coordinator.serve(now, costs.coordinator), "pull", worker)
        elif what == "pull":
            left[worker] = servers
            for s in range(servers):
                at(cores[s].serve(now, half), "send", worker, s)
        elif what == "send":
            at(out[server].serve(now, share / link), "pulled", worker, server)
        elif what == "pulled":
            left[worker] -= 1
            if left[worker] == 0:
                at(now + max(rng.gauss(compute, compute / 10), 0.0) + costs.worker * nbytes, "push", worker)
        elif what == "push":
            left[worker] = servers
            for s in range(servers):
                at(into[s].serve(now, share / link), "apply", worker, s)
        elif what == "apply":
            at(cores[server].serve(now, half), "applied", worker, server)
        else:
            left[worker] -= 1
            if left[worker] == 0:
                steps += now >= warm
                at(now, "ask", worker)
    return {
        "per_s": steps / (seconds - warm),
        "server_core": min(max(q.busy for q in cores) / seconds, 1.0),
        "server_link": min(max(q.busy for q in (*out, *into)) / seconds, 1.0),
        "coordinator": coordinator.busy / seconds,
    }


def formula(workers: int, servers: int, nbytes: float, compute: float, link: float, costs: Costs) -> tuple[float, str]:
    """Steps per second as the sizing formula says, and what bounds them."""
    share = nbytes / servers
    core = costs.fixed + costs.per_byte * share
    alone = compute + costs.worker * nbytes + core + 2 * share / link + costs.coordinator
    bounds = {
        "workers": workers / alone, "server cores": 1 / core, "server links": link / share,
        "coordinator": 1 / costs.coordinator,
    }  # fmt: skip
    least = min(bounds, key=lambda name: bounds[name])
    return bounds[least], least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, default=RESULTS / "parameter_server_scaling.json")
    parser.add_argument("--lane", default="tcp")
    parser.add_argument("--megabytes", type=float, default=4.0, help="pulled, and as many pushed, in each step")
    parser.add_argument("--compute", type=float, default=0.2, help="seconds that a worker computes for each step")
    parser.add_argument("--link", type=float, default=1.25e9, help="bytes per second each way of a server's network")
    parser.add_argument("--seconds", type=float, default=10.0, help="of simulated time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    costs = Costs.measured(options.calibration, options.lane)
    nbytes = options.megabytes * (1 << 20)
    title = (
        f"{options.megabytes:g} MB pulled and pushed a step, {options.compute:g} s of computation, links of "
        f"{options.link / 1e9:g} GB/s each way; server {1e6 * costs.fixed:.0f} us + {1e9 * costs.per_byte:.3f} ns a "
        f"byte, coordinator {1e6 * costs.coordinator:.0f} us a function ({options.lane})"
    )
    lines = [
        title,
        "",
        "| workers | servers | steps/s | formula | ratio | bound by | server core | link | coordinator |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for workers in (100, 200, 400, 700, 1000):
        for servers in (1, 2, 4, 8, 16):
            found = simulate(workers, servers, nbytes, options.compute, options.link, costs, options.seconds)
            says, bound = formula(workers, servers, nbytes, options.compute, options.link, costs)
            rows.append({"workers": workers, "servers": servers, **found, "formula": says, "bound": bound})
            busy = " | ".join(f"{100 * found[name]:.0f} %" for name in ("server_core", "server_link", "coordinator"))
            rates = f"{found['per_s']:.0f} | {says:.0f} | {found['per_s'] / says:.2f}"
            lines.append(f"| {workers} | {servers} | {rates} | {bound} | {busy} |")
    text = "\n".join(lines) + "\n"
    if options.out:
        options.out.write_text(json.dumps({"title": title, "costs": vars(costs), "rows": rows}, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
