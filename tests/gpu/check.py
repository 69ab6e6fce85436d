"""Everything that needs an accelerator to be seen, in one call of at most 8 minutes; prints one table.

    make gpu                                        # on the GPU of this machine, else on the pretend accelerator
    python tests/gpu/check.py --out FILE.md         # writes the table too

Nothing is downloaded and nothing installed, the package neither: torch, triton and pytest with pytest-timeout and
pytest-xdist are enough. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import torch
from device_kind import KIND

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUDGET = 480.0  # seconds
REAL = KIND != "pretend"


@dataclass
class Section:
    """One row of the table.

    Attributes:
        name: what is shown.
        command: after the interpreter.
        limit: seconds.
        pytest: whether its cases can be counted.
        environment: on top of the present one.
    """

    name: str
    command: list[str]
    limit: float
    pytest: bool = True
    environment: dict[str, str] | None = None


def cases(name: str, *files: str, limit: float, marker: str = "", environment: dict[str, str] | None = None) -> Section:
    """A section of test files."""
    command = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", "python_files=cases_*.py test_*.py"]
    return Section(name, [*command, *(["-m", marker] if marker else []), *files], limit, environment=environment)


def ranks(name: str, count: int, *arguments: str) -> Section:
    """A section of some ranks on this machine's devices."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return Section(name, [*launch, "tests/gpu/rank_program.py", *arguments], 90.0, pytest=False)


def sections() -> list[Section]:
    """What is run, in the order of importance."""
    interpreted = {"TRITON_INTERPRET": "1"}
    made = [cases("replicas of one process (G1 to G15)", "tests/gpu/cases_replicas.py", limit=120)]
    made.append(cases("steps of such replicas, saving, central storage", "tests/gpu/cases_steps.py", limit=120))
    made.append(ranks("2 ranks over RING: plain, checkpointed, reentrant", 2, "train", "RING"))
    made.append(ranks("2 ranks over RING: reductions of device and CPU values", 2, "values", "RING"))
    made.append(ranks("2 ranks over RING: loops of users", 2, "everyday", "RING"))
    made.append(ranks("a library's group of one rank: every collective", 1, "library", "-"))
    if not REAL or torch.cuda.device_count() > 1:
        made.append(ranks("2 ranks over the library: plain, checkpointed, reentrant", 2, "train", "AUTO"))
        made.append(ranks("2 ranks over the library: reductions", 2, "values", "AUTO"))
        made.append(ranks("2 ranks over the library: loops of users", 2, "everyday", "AUTO"))
    if REAL:
        made.append(cases("kernels: bits, 2^31 elements", "tests/gpu/test_triton_on_cuda.py", limit=150, marker="gpu"))
        made.append(cases("prefetched batches", "tests/gpu/test_input_on_cuda.py", limit=60, marker="gpu"))
        made.append(cases("CUDA graphs, torch.compile", "tests/gpu/cases_compiled.py", limit=120))
        made.append(Section("quickstart", ["examples/quickstart.py", "--epochs", "3"], 90.0, pytest=False))
        made.append(Section("sums: speed", ["benchmarks/aggregation_gpu.py", "--budget", "60"], 100.0, pytest=False))
    else:
        made.append(cases("the pretend accelerator itself", "tests/pretend_accelerator/cases_device.py", limit=60))
        kernels = "tests/kernels/test_triton_plan.py"
        made.append(cases("kernels in Triton's interpreter", kernels, limit=120, environment=interpreted))
        smoke = ["benchmarks/aggregation_gpu.py", "--smoke"]
        made.append(Section("sums: the script", smoke, 100.0, pytest=False, environment=interpreted))
    return made


def run(section: Section, left: float) -> tuple[bool, str, float, str]:
    """Whether it passed, what came out in a few words, the seconds it took, and all it printed."""
    begin = time.perf_counter()
    limit = min(section.limit, left)
    if limit < 5:
        return False, "no time was left", 0.0, ""
    environment = {**os.environ, "TFSTYLE_DEVICE_KIND": KIND, "OMP_NUM_THREADS": "4", **(section.environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(ROOT), environment.get("PYTHONPATH", "")]
        if importlib.util.find_spec("tfstyle_dist_kernels") is None:  # what an installation would do
            (Path(folder) / "tfstyle_dist_kernels").symlink_to(ROOT / "kernels")
            paths.append(folder)
        if not any(distributions(name="tfstyle_dist", path=[str(ROOT), *sys.path])):
            environment["PYTEST_PLUGINS"] = "tfstyle_dist.testing.plugin"
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        report = Path(folder) / "report.xml"
        command = [sys.executable, *section.command, *([f"--junitxml={report}"] if section.pytest else [])]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired as expired:
            said = expired.stdout or b""
            text = said.decode(errors="replace") if isinstance(said, bytes) else said
            return False, f"not over after {limit:.0f} s", time.perf_counter() - begin, text
        seconds, passed = time.perf_counter() - begin, done.returncode == 0
        result = "passed" if passed else f"exit code {done.returncode}"
        if section.pytest and report.exists():
            suite = next(ElementTree.parse(report).iter("testsuite")).attrib
            bad, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
            result = f"{int(suite['tests']) - bad - skipped} passed, {bad} failed, {skipped} skipped"
        return passed, result, seconds, done.stdout + done.stderr


def machine() -> str:
    """What it ran on."""
    device = torch.cuda.get_device_name(0) if REAL and KIND == "cuda" else f"the {KIND} accelerator"
    count = torch.get_device_module(KIND).device_count() if REAL else 4
    return f"{device} x {count}, torch {torch.__version__}, Python {platform.python_version()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the table")
    parser.add_argument("--only", default="", help="a regular expression: sections to run")
    options = parser.parse_args()
    begin, failed = time.perf_counter(), []
    table = [f"On {machine()}:", "", "| | result | seconds |", "| --- | --- | --- |"]
    for section in sections():
        if not re.search(options.only, section.name):
            continue
        passed, result, seconds, output = run(section, BUDGET - (time.perf_counter() - begin))
        table.append(f"| {section.name} | {'' if passed else '**FAILED** '}{result} | {seconds:.0f} |")
        print(table[-1], flush=True)
        if not passed:
            failed.append(section.name)
            print(output[-6000:], flush=True)
    verdict = f"failed: {', '.join(failed)}" if failed else "all passed"
    table += ["", f"{time.perf_counter() - begin:.0f} s in all; {verdict}"]
    print("\n" + "\n".join(table))
    if options.out:
        options.out.write_text("\n".join(table) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
