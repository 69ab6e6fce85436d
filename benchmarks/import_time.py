"""How long ``import tfstyle_dist`` takes next to ``import torch``, each in fresh interpreters, taking turns.

    python benchmarks/import_time.py --rounds 7 --out benchmarks/results/import_time.json

``tfstyle_dist`` alone loads nothing until a name is used; a strategy loads what it needs, all names everything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

STATEMENTS = (
    "import torch",
    "import tfstyle_dist",
    "import tfstyle_dist as tfd; tfd.MirroredStrategy",
    "import tfstyle_dist as tfd; [getattr(tfd, name) for name in tfd.__all__]",
)
PROGRAM = "import time; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"


def seconds(statement: str) -> float:
    """Time of one import in a fresh interpreter."""
    command = [sys.executable, "-c", PROGRAM.format(statement)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    for statement in STATEMENTS:
        seconds(statement)  # warms the disk cache
    times: dict[str, list[float]] = {s: [] for s in STATEMENTS}
    for _ in range(options.rounds):
        for statement in STATEMENTS:
            times[statement].append(seconds(statement))
    print("| statement | seconds (median) | x import torch |\n|---|---|---|")
    for statement in STATEMENTS:
        ratio = statistics.median(a / b for a, b in zip(times[statement], times["import torch"], strict=True))
        print(f"| {statement} | {statistics.median(times[statement]):.2f} | {ratio:.2f} |")
    if options.out:
        options.out.write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
