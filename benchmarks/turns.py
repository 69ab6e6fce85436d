"""Time of a step of two replicas that take turns in one process, over two bare steps one after the other.

    python benchmarks/turns.py --out benchmarks/results/turns.md

``floor`` trains two models of one device in turn, each with its own batch of 32 and its own SGD step: what taking turns
could cost at best. It has a process of its own, as OpenMP's threads of the replicas would slow it down. The two take
turns in blocks; medians over the blocks, and of the ratios of neighbouring blocks, are printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from sync_step import BLOCKS, MODELS, batch, build, make, step_of, timed

WARM_UP = 60  # steps, of which a strategy tries some in another way (tfstyle_dist/runtime/openmp_pools.py)


def floor(name: str) -> Callable[[], object]:
    """Two steps of one device, one after the other."""
    models = [build(name) for _ in range(2)]
    steps = [step_of(model, torch.optim.SGD(model.parameters(), lr=0.01)) for model in models]
    data = [batch(name, replica) for replica in range(2)]
    return lambda: [step(*own) for step, own in zip(steps, data, strict=True)]


def serve(form: str, name: str, connection: Connection) -> None:
    """In a process of its own: seconds of a step in a block, for each number of steps that it gets."""
    step = floor(name) if form == "floor" else make("replicas", name)
    while steps := connection.recv():
        connection.send(timed(steps, step))


def measure(name: str, blocks: int) -> str:
    """One row of the table."""
    seconds: dict[str, list[float]] = {"floor": [], "turns": []}
    steps = BLOCKS[name][0] * 2
    ends: dict[str, Connection] = {}
    for form in seconds:
        ends[form], theirs = multiprocessing.Pipe()
        multiprocessing.get_context("spawn").Process(target=serve, args=(form, name, theirs), daemon=True).start()
        theirs.close()  # else nobody would notice the end of the process

    def block(form: str, steps: int) -> float:
        ends[form].send(steps)
        return float(ends[form].recv())

    for form in seconds:
        block(form, max(steps // 2, WARM_UP))
    for number in range(blocks):
        for form in seconds if number % 2 else list(seconds)[::-1]:
            seconds[form].append(block(form, steps))
    for end in ends.values():
        end.send(0)
    ratios = sorted(t / f for f, t in zip(seconds["floor"], seconds["turns"], strict=True))
    low, middle, high = (statistics.quantiles(ratios, n=20)[k] for k in (3, 9, 15))
    ms = {form: statistics.median(values) * 1e3 for form, values in seconds.items()}
    return f"| {name} | {ms['floor']:.2f} | {ms['turns']:.2f} | {middle:.2f} | {low:.2f} to {high:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the table as Markdown")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {cores} cores, "
        f"{torch.get_num_threads()} threads, {options.blocks} blocks",
        "",
        "| model | floor, ms | turns, ms | ratio (median of blocks) | 20 % to 80 % |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in options.models:
        lines.append(measure(name, options.blocks))
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
