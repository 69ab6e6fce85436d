"""Runs drawn programs on a facade and writes what each gave.

usage: record_drawn.py --facade MODULE --out FILE [--of variables|inputs] [--count N] [--workers N]

As record.py, which has the recorded programs. With facade_tf.py and an environment that has TensorFlow 2.21 this
records drawn_golden.json anew, and with ``--of inputs`` drawn_inputs_golden.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import drawn_inputs
import harness
from drawn_plans import WORKERS, drawn
from drawn_runs import Run
from record import load

TOGETHER = 8
"""Programs that the workers of a cluster run one after the other."""


def made(of: str, xp: Any, seed: int, workers: int, strategy: Any = None) -> Any:
    """A drawn program that can be run."""
    if of == "inputs":
        return drawn_inputs.Reading(xp, drawn_inputs.drawn(seed, workers), strategy)
    return Run(xp, drawn(seed) if workers == 1 else drawn(seed, WORKERS), strategy)


def of_workers(xp: Any, strategy: Any, index: int, seeds: list[int], of: str) -> dict[str, Any]:
    """What one worker sees of some programs: those up to the first that leaves the collectives out of step."""
    found: dict[str, Any] = {}
    for seed in seeds:
        found[str(seed)] = made(of, xp, seed, 2, strategy).results()
        if any(isinstance(result, dict) and "error" in result for result in found[str(seed)]):
            break
    return found


def record(make: Any, of: str, seeds: list[int]) -> dict[str, Any]:
    """Each program on a process of its own."""
    return {
        str(seed): harness.run_case_forked(lambda xp, seed=seed: made(of, xp, seed, 1).results(), make, 60)
        for seed in seeds
    }


def record_workers(make: Any, of: str, seeds: list[int]) -> dict[str, Any]:
    """The programs in which no worker of two met an error: what each saw."""
    found: dict[str, Any] = {}
    while seeds:
        some = seeds[:TOGETHER]
        got = harness.run_case_forked(
            lambda xp, some=some: xp.multi_worker(2, of_workers, timeout=60, seeds=some, of=of), make, 100
        )
        tried = max(1, min(len(each) for each in got)) if isinstance(got, list) else 1
        for seed in map(str, some[:tried]):
            each = [part.get(seed) for part in got] if isinstance(got, list) else []
            if each and all(isinstance(part, list) and '"error"' not in json.dumps(part) for part in each):
                found[seed] = each
        seeds = seeds[tried:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--facade", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--of", choices=["variables", "inputs"], default="variables")
    parser.add_argument("--count", type=int, default=300, help="programs on one process")
    parser.add_argument("--workers", type=int, default=200, help="programs to try on two workers")
    options = parser.parse_args()
    make = load(options.facade)
    found = {
        "programs": record(make, options.of, list(range(options.count))),
        "workers": record_workers(make, options.of, list(range(options.workers))),
    }
    Path(options.out).write_text(json.dumps(found, separators=(",", ":")).replace('],"', '],\n"') + "\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
