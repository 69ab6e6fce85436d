"""Time of distributed tests: rank processes kept from test to test against processes started for each test.

    python benchmarks/testing.py
    python benchmarks/testing.py --tests 50 --rounds 3 --out benchmarks/results/testing.json

Each round runs a file of trivial tests (two ranks join a Gloo group and add a number) in pytest sessions of three
forms, one after the other: pool (the plugin), fresh (the plugin with --fresh-ranks) and spawn (each test calls
torch.multiprocessing.spawn, as many suites do). Printed are seconds a session and the median of the rounds' ratios.
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

import torch

PLUGIN = """
import pytest
import torch
import torch.distributed as dist


@pytest.mark.distributed(workers=2, timeout=60)
@pytest.mark.parametrize("number", range({tests}))
def test_sum(process_group, rank, number):
    tensor = torch.tensor([float(number + rank)])
    dist.all_reduce(tensor)
    assert tensor.item() == 2 * number + 1
"""

SPAWN = """
import pytest
import torch
import torch.distributed as dist


def body(rank, path, number):
    dist.init_process_group("gloo", init_method=f"file://{{path}}", rank=rank, world_size=2)
    tensor = torch.tensor([float(number + rank)])
    dist.all_reduce(tensor)
    assert tensor.item() == 2 * number + 1
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range({tests}))
def test_sum(tmp_path, number):
    torch.multiprocessing.spawn(body, (tmp_path / "rendezvous", number), nprocs=2)
"""

FORMS = {"pool": (PLUGIN, []), "fresh": (PLUGIN, ["--fresh-ranks"]), "spawn": (SPAWN, [])}


def session(form: str, tests: int) -> float:
    """Seconds of one pytest session."""
    source, arguments = FORMS[form]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_sums.py").write_text(source.format(tests=tests))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        begin = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begin
    if done.returncode != 0 or f"{tests} passed" not in done.stdout:
        raise SystemExit(f"{form}: the tests did not pass:\n{done.stdout}\n{done.stderr}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS)[1:], default=list(FORMS)[1:], help="next to pool")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds):
        rounds.append({form: session(form, options.tests) for form in ("pool", *options.forms)})
        print({form: round(seconds, 1) for form, seconds in rounds[-1].items()}, flush=True)
    ratio = {form: round(statistics.median(r["pool"] / r[form] for r in rounds), 3) for form in options.forms}
    print("the pool takes " + " and ".join(f"{number} of the time of {form}" for form, number in ratio.items()))
    if options.out is not None:
        facts = {"cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
        result = {"machine": facts, "tests": options.tests, "seconds": rounds, "pool_to": ratio}
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
