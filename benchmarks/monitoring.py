"""What monitoring costs on the quickstart's model and batches, and whether its phases add up to the step.

    python benchmarks/monitoring.py
    python benchmarks/monitoring.py --rounds 5 --out benchmarks/results/monitoring.json

The quickstart's network, optimizer, batch size and input are trained with the monitor on and off, in blocks of steps
that take turns in the same process (on first, then off first, and so on). The overhead of a form is the median over the
pairs of neighbouring blocks of (time on - time off) / time off. Forms: one (one replica), threads (two replicas in one
process), ranks (two processes under torchrun).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import tfstyle_dist as td

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import quickstart

FORMS = ("one", "threads", "ranks")
BATCH = 48
BLOCK = 10


def measure(form: str, pairs: int) -> dict[str, Any]:
    """Times of blocks with the monitor on and off, and the report of those with it on."""
    torch.set_num_threads(1 if form == "ranks" else 2)
    devices = {"one": ["cpu:0"], "threads": ["cpu:0", "cpu:1"], "ranks": None}[form]
    with td.MirroredStrategy(devices) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            model, optimizer = quickstart.build()

        def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        batches = quickstart.training_batches(strategy, BATCH)
        stream = itertools.chain.from_iterable(itertools.repeat(batches))

        def block(on: bool, steps: int = BLOCK) -> float:
            strategy.monitor.enabled = on
            begin = time.perf_counter()
            for batch in itertools.islice(stream, steps):
                losses = strategy.run(train_step, args=batch)
                float(strategy.reduce("MEAN", losses, axis=None))
            return time.perf_counter() - begin

        for _ in range(100 // BLOCK):  # past the first steps, which are all measured
            block(True)
        block(False)
        on, off = [], []
        for pair in range(pairs):
            for wanted in (True, False) if pair % 2 else (False, True):
                (on if wanted else off).append(block(wanted))
        report = strategy.report(quiet=True)
        # A stopwatch around steps that are all measured must agree with what their phases add up to.
        strategy.monitor.every = 1
        strategy.monitor.reset()
        by_hand = block(True, 200) / 200
        phases = [sum(r.seconds) for r in strategy.report(quiet=True).replicas]
        return {
            "on": [seconds / BLOCK for seconds in on],
            "off": [seconds / BLOCK for seconds in off],
            "phases_over_step": [value / by_hand for value in phases],
            "report": str(report),
        }


def launch(form: str, pairs: int) -> dict[str, Any]:
    """``measure`` in fresh processes; what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if form == "ranks" else []
        command = [sys.executable, *launcher, __file__, "--form", form, "--pairs", str(pairs), "--write", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1" if form == "ranks" else "2"}
        subprocess.run(command, check=True, env=environment, timeout=600, capture_output=True)
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=120, help="pairs of blocks in a round")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON, and the table as .md beside it")
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        found = measure(options.form, options.pairs)
        if int(os.environ.get("RANK", "0")) == 0:
            options.write.write_text(json.dumps(found))
        return
    lines = [
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores",
        "",
        f"quickstart, global batch {BATCH}; {options.rounds} rounds of {options.pairs} pairs of {BLOCK} steps",
        "",
        "| form | ms a step, off | overhead, median (25 % to 75 %) | phases / step, least and most |",
        "|---|---|---|---|",
    ]
    results: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
    for _ in range(options.rounds):
        for form in FORMS:
            results[form].append(launch(form, options.pairs))
    for form, rounds in results.items():
        extra = [(a - b) / b for r in rounds for a, b in zip(r["on"], r["off"], strict=True)]
        low, middle, high = statistics.quantiles(extra, n=4)
        step = statistics.median(b for r in rounds for b in r["off"])
        sums = [value for r in rounds for value in r["phases_over_step"]]
        overhead = f"{middle:+.2%} ({low:+.2%} to {high:+.2%})"
        lines.append(f"| {form} | {step * 1e3:.3f} | {overhead} | {min(sums):.4f}, {max(sums):.4f} |")
    lines += ["", "The last round's reports:", ""]
    for form, rounds in results.items():
        lines += [f"{form}:", "", "```", rounds[-1]["report"], "```", ""]
    text = "\n".join(lines)
    print(text)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()
