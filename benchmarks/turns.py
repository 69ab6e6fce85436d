"""Time of a step of two replicas that take turns in one process, over two bare steps one after the other.

    python benchmarks/turns.py --out benchmarks/results/turns.md

``floor`` trains two models of one device in turn, each with its own batch of 32 and its own SGD step: what taking turns
could cost at best. Both forms run in one process in alternating blocks; medians over the blocks, and of the ratios of
neighbouring blocks, are printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from sync_step import BLOCKS, MODELS, batch, build, make, step_of, timed


def floor(name: str) -> Callable[[], object]:
    """Two steps of one device, one after the other."""
    models = [build(name) for _ in range(2)]
    steps = [step_of(model, torch.optim.SGD(model.parameters(), lr=0.01)) for model in models]
    data = [batch(name, replica) for replica in range(2)]
    return lambda: [step(*own) for step, own in zip(steps, data, strict=True)]


def measure(name: str, blocks: int) -> str:
    """One row of the table."""
    forms = {"floor": floor(name), "turns": make("replicas", name)}
    steps = BLOCKS[name][0] * 2
    for form in forms.values():
        timed(max(steps // 2, 5), form)
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for number in range(blocks):
        for form in forms if number % 2 else list(forms)[::-1]:
            seconds[form].append(timed(steps, forms[form]))
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
