"""Runs programs that use other people's code in every form, and writes the table of what agrees with one device.

    make foreign                                                # all, in an environment of its own
    python tests/foreign/sweep/measure.py --group steps --case hook   # a part
    python tests/foreign/sweep/measure.py --installed                 # without the groups whose packages are missing
    TFSTYLE_FOREIGN_DEVICE=cuda python tests/foreign/sweep/measure.py --forms replicas ranks --together   # a GPU

The exit code is 1 if a case neither agrees nor is refused or explained in docs/status.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TFSTYLE_TIMEOUT_SECONDS", "40")
# A package that asks for CUDA when it is imported would otherwise keep the forked processes from using it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import argparse
import contextlib
import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import servers
import torch
from forms import DEVICE, STAYING
from judge import Verdict, judge
from programs import ALL_FORMS, CASES, Net, Run
from report import written

TABLES = {
    "steps": (
        "steps_modules",
        "steps_accumulated",
        "steps_optimizers",
        "steps_two_optimizers",
        "steps_trainers",
        "steps_parameters",
        "steps_weights",
        "steps_gradients",
        "steps_second_order",
        "steps_calls",
        "steps_modes",
        "steps_functions",
        "steps_more",
        "steps_still_more",
        "steps_errors",
        "steps_places",
        "steps_written",
        "steps_kept",
        "steps_states",
        "steps_arrays",
        "steps_trained",
        "steps_gradients_changed",
        "steps_wrapped",
        "steps_published",
        "steps_helpers",
        "steps_named",
    ),
    "torch": ("optimizers_torch", "schedulers"),
    "transformers": ("models_transformers",),
    "optimizers": ("optimizers_packages", "optimizers_more"),
    "models": ("models_images", "models_packages", "models_more", "models_kinds", "models_written"),
    "libraries": ("libraries_loops", "libraries_kinds", "libraries_layers"),
    "broken": ("broken",),
}
"""The modules that fill the table, by what is asked for with ``--group``; the last only if it is named."""


def fill(groups: Sequence[str], installed: bool) -> list[str]:
    """Imports the modules of some groups, and returns what is missing.

    Raises:
        ImportError: a package is missing and ``installed`` is not given.
    """
    missing = []
    if "libraries" in groups:  # pykeen lists all optimizers by name when it is imported, and no two may have the same
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("pykeen.models")
    for group in groups:
        for module in TABLES[group]:
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                if not installed:
                    raise
                missing.append(f"{module} (no {error.name})")
    return missing


def warm() -> None:
    """Imports here what torch imports when first used, so that the forked processes need not."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            for form in ("one", "replicas"):
                _warm(form)
            names = [n for n in sys.modules if n.startswith(("torch", "tfstyle_dist", "sympy", "numpy"))]
            os.write(writing, " ".join(names).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as names:
        for name in names.read().split():
            try:
                importlib.import_module(name)
            except Exception as error:  # a module that only exists once something was done
                print(f"not imported before: {name}: {error}", file=sys.stderr)
    os.wait()


def _warm(form: str) -> None:
    from forms import strategy_of

    run = Run(form, strategy_of(form) if form != "one" else None)
    with run.scope():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(run.x(0)).sum().backward()
        optimizer.step()

    run.run(step)


def _one(asked: tuple[str, tuple[str, ...], bool]) -> list[dict[str, Any]]:
    return judge(*asked)


def verdicts_of(titles: Sequence[str], forms: tuple[str, ...], jobs: int, together: bool) -> Iterator[Verdict]:
    """The verdicts of the cases, as they come."""
    alone = tuple(form for form in forms if form != "servers")
    most = 25 if together and not STAYING.groups else None
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=most) as pool:
        for answers in pool.imap_unordered(_one, [(title, alone, together) for title in titles]):
            yield from (Verdict(**answer) for answer in answers)
    on_servers = [title for title in titles if "servers" in forms and "servers" in CASES[title].forms]
    if on_servers:
        with servers.cluster():
            for title in on_servers:
                yield from (Verdict(**answer) for answer in judge(title, ("servers",)))


def main() -> int:
    """Measures, prints what is wrong, writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--group", nargs="+", choices=list(TABLES), default=list(TABLES)[:-1], help="which tables of cases"
    )
    parser.add_argument("--case", nargs="+", default=[""], metavar="PART", help="only cases with PART in their name")
    parser.add_argument("--forms", nargs="+", choices=ALL_FORMS, default=list(ALL_FORMS))
    parser.add_argument("--jobs", type=int, default=2, help="how many cases at a time")
    parser.add_argument("--installed", action="store_true", help="leave out groups whose packages are missing")
    parser.add_argument(
        "--together",
        action="store_true",
        help="run many cases one after the other in the same processes: faster on a device that takes long to begin",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--json", type=Path, help="write the verdicts there as they come, a line each")
    parser.add_argument("--out", type=Path, help="write the table there")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    missing = fill(asked.group, asked.installed)
    if DEVICE not in ("cpu", "pretend"):
        STAYING.groups = asked.group
    titles = [title for title in CASES if any(part in title for part in asked.case)]
    if asked.list:
        print("\n".join(titles))
        return 0
    warm()
    verdicts = []
    if asked.json:
        asked.json.write_text("", encoding="utf-8")
    for verdict in verdicts_of(titles, tuple(asked.forms), asked.jobs, asked.together):
        verdicts.append(verdict)
        if asked.json:
            with asked.json.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(verdict.as_dict()) + "\n")
        if not verdict.good:
            said = " ".join(verdict.said.split())
            print(
                f"{verdict.case} [{verdict.form}] {verdict.verdict} {verdict.difference or ''} {said:.500}", flush=True
            )
    text = written(verdicts, missing, time.monotonic() - start)
    print(text.partition("\n## ")[0])
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    return int(any(not verdict.good for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
