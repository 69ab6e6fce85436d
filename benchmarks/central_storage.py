"""Peak memory and step time of two ranks that train with Adam: CentralStorageStrategy against MirroredStrategy.

    python benchmarks/central_storage.py
    python benchmarks/central_storage.py --rounds 3 --out benchmarks/results/central_storage.json
    python benchmarks/central_storage.py --rounds 1 --add --out benchmarks/results/central_storage.json    # one more

Each measurement starts fresh ranks with torchrun; the forms take turns. While the first steps run, this process reads
each rank's PSS (its private memory, and a share of each page that it maps together with others) from the kernel; the
peak of the largest rank counts, from the building of the model on, Python and torch included. Then the ranks are left
alone and time their steps. Ratios are those of a round; their median is printed, because shared machines are noisy.
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
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tfstyle_dist as td

FORMS = ("mirrored", "central")
MEMORY_STEPS = 4


# ---- a rank ---------------------------------------------------------------------------------------------------------


def rank_main(options: argparse.Namespace) -> None:
    """Trains, tells the parent its process id, and leaves its times."""
    torch.set_num_threads(1)
    make = {"mirrored": td.MirroredStrategy, "central": td.experimental.CentralStorageStrategy}[options.form]
    with make() as strategy:
        rank = strategy.worker.group.rank
        (options.folder / f"pid{rank}").write_text(str(os.getpid()))
        with strategy.scope():
            model = nn.Sequential(*[nn.Linear(options.width, options.width) for _ in range(options.layers)])
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
        inputs = torch.randn(options.batch // 2, options.width, generator=torch.Generator().manual_seed(rank))

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            if options.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        for _ in range(MEMORY_STEPS):
            strategy.run(step)
        (options.folder / f"timing{rank}").touch()
        strategy.worker.group.gather_objects(0, "benchmark: start together")
        seconds = []
        for _ in range(options.steps):
            begin = time.perf_counter()
            strategy.run(step)
            seconds.append(time.perf_counter() - begin)
        count = sum(p.numel() for p in model.parameters())
        (options.folder / f"result{rank}").write_text(json.dumps({"seconds": seconds, "parameters": count}))


# ---- the parent -----------------------------------------------------------------------------------------------------


def pss(pid: str) -> float:
    """MiB of a process, shared pages counted in parts; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0) / 1024


def measure(form: str, options: argparse.Namespace) -> dict[str, float]:
    """One fresh start of two ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        command += ["--form", form, "--folder", name, "--steps", str(options.steps), "--batch", str(options.batch)]
        command += ["--width", str(options.width), "--layers", str(options.layers)]
        command += ["--clip"] if options.clip else []
        peaks, total = [0.0, 0.0], 0.0
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            while process.poll() is None:
                pids = [path.read_text() if (path := folder / f"pid{r}").exists() else "" for r in range(2)]
                if all(pids) and not (folder / "timing0").exists() and not (folder / "timing1").exists():
                    now = [pss(pid) for pid in pids]
                    peaks, total = [max(a, b) for a, b in zip(peaks, now, strict=True)], max(total, sum(now))
                time.sleep(0.005 if all(pids) else 0.1)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            raise SystemExit(f"the ranks of {form} ended with {process.returncode}")
        results = [json.loads((folder / f"result{r}").read_text()) for r in range(2)]
    steps = [max(times) for times in zip(*(r["seconds"] for r in results), strict=True)]
    return {
        "peak_mib": round(max(peaks), 1),
        "peak_mib_of_both": round(total, 1),
        "step_s": round(statistics.median(steps), 4),
        "parameters": results[0]["parameters"],
    }


def table(facts: dict[str, Any], summary: dict[str, Any], rounds: list[dict[str, dict[str, float]]]) -> str:
    """The rounds for people."""
    lines = [
        f"torch {facts['torch']}, Python {facts['python']}, {platform.machine()}, {facts['cores']} cores",
        "",
        f"two ranks, Adam, {facts['parameters']:,} parameters in float32, global batch {facts['batch']}; PSS, peak "
        f"from the building of the model on; {len(rounds)} rounds",
        "",
        "| round | form | peak of the largest rank, MiB | peak of both, MiB | s a step (median) |",
        "|---|---|---|---|---|",
    ]
    for number, figures in enumerate(rounds, start=1):
        for form in FORMS:
            f = figures[form]
            lines.append(f"| {number} | {form} | {f['peak_mib']} | {f['peak_mib_of_both']} | {f['step_s']:.2f} |")
    largest, both, step = summary.values()
    lines += [
        "",
        f"central over mirrored, median of the rounds' ratios: {largest} (largest rank), {both} (both), {step} (time "
        "of a step)",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=int, default=24, help="of width x width weights; 24 of 2048: 100.7M parameters"
    )
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16, help="global batch")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each start")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clip", action="store_true", help="clip gradients: each rank then has gradients of its own")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON, and a table as .md beside it")
    parser.add_argument("--add", action="store_true", help="add the rounds to those that --out has already")
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form is not None:
        rank_main(options)
        return
    rounds: list[dict[str, dict[str, float]]] = []
    if options.add and options.out is not None and options.out.exists():
        rounds = json.loads(options.out.read_text())["rounds"]
    for number in range(len(rounds), len(rounds) + options.rounds):
        figures = {form: measure(form, options) for form in (FORMS if number % 2 == 0 else reversed(FORMS))}
        rounds.append(figures)
        print(json.dumps(figures), flush=True)

    def ratio(what: str) -> float:
        return round(statistics.median(r["central"][what] / r["mirrored"][what] for r in rounds), 3)

    summary: dict[str, Any] = {f"central_to_mirrored_{w}": ratio(w) for w in ("peak_mib", "peak_mib_of_both", "step_s")}
    print(json.dumps(summary))
    if options.out is not None:
        facts = {
            "ranks": 2,
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "parameters": rounds[0]["central"]["parameters"],
            "batch": options.batch,
            "clip": options.clip,
            "optimizer": "Adam",
        }
        options.out.write_text(json.dumps({"machine": facts, "summary": summary, "rounds": rounds}, indent=2) + "\n")
        options.out.with_suffix(".md").write_text(table(facts, summary, rounds))


if __name__ == "__main__":
    main()
