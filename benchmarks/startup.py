"""From launch to the end of the first training step, next to DistributedDataParallel, each as fresh processes.

    python benchmarks/startup.py --rounds 7 --out benchmarks/results/startup.json

Forms: ddp and ours (torchrun --standalone), launch (ours, python -m tfstyle_dist.launch, a TF_CONFIG cluster). They
take turns, so that a busy machine slows all alike; the ratio is taken round by round. The first round warms the disk
cache and does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

FORMS = ("ddp", "ours", "launch")
RANKS = (2, 4)
MARK = "first step done at "


def first_step(form: str) -> None:
    """Builds a small model, makes one step, and says on worker 0 when that was."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    x, y = torch.randn(8, 64), torch.randint(0, 10, (8,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    if form == "ddp":
        torch.distributed.init_process_group("gloo")
        model: nn.Module = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step()
        say(torch.distributed.get_rank())
        torch.distributed.destroy_process_group()
        return
    import tfstyle_dist as tfd

    with tfd.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy.run(step)
        say(0 if strategy.is_chief else 1)


def say(rank: int) -> None:
    if rank == 0:
        print(f"{MARK}{time.time()}", flush=True)


def seconds(form: str, ranks: int) -> float:
    """Time from the launcher's start to the end of worker 0's first step."""
    launcher = {
        "launch": ["tfstyle_dist.launch", "--workers", str(ranks)],
    }.get(form, ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"])
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TF_CONFIG")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    begin = time.time()
    done = subprocess.run(
        [sys.executable, "-m", *launcher, __file__, "--form", form],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    # A DDP rank sometimes fails when it leaves while its peer is leaving: the step was made by then.
    if MARK not in done.stdout or (done.returncode != 0 and form != "ddp"):
        raise RuntimeError(f"{form} with {ranks} ranks ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return float(done.stdout.split(MARK)[1].split()[0]) - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        first_step(options.form)
        return
    import torch

    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    print("| ranks | form | seconds (median) | x DDP (median of rounds) |\n|---|---|---|---|")
    results = []
    for ranks in options.ranks:
        for form in FORMS:
            seconds(form, ranks)
        rounds = [{form: seconds(form, ranks) for form in FORMS} for _ in range(options.rounds)]
        for form in FORMS:
            middle = statistics.median(one[form] for one in rounds)
            ratio = statistics.median(one[form] / one["ddp"] for one in rounds)
            print(f"| {ranks} | {form} | {middle:.2f} | {ratio:.2f} |", flush=True)
        results.append({"ranks": ranks, "cores": os.cpu_count(), "torch": torch.__version__, "seconds": rounds})
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
