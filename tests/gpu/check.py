"""Everything that needs an accelerator to be seen, in one call of at most 8 minutes; prints one table.

    make gpu                                        # on the GPU of this machine, else on the pretend accelerator
    python tests/gpu/check.py --out FILE.md         # writes the table too

Nothing is downloaded and nothing installed, the package neither: torch, triton and pytest with pytest-timeout and
pytest-xdist are enough. Sections that check run side by side, a process for every four cores; those that measure run
alone, afterwards. The exit code is 1 if anything failed.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
        measures: whether nothing else may run.
        environment: on top of the present one.
    """

    name: str
    command: list[str]
    limit: float
    pytest: bool = True
    measures: bool = False
    environment: dict[str, str] | None = None


def cases(name: str, *files: str, limit: float, marker: str = "", environment: dict[str, str] | None = None) -> Section:
    """A section of test files."""
    command = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", "python_files=cases_*.py test_*.py"]
    return Section(name, [*command, *(["-m", marker] if marker else []), *files], limit, environment=environment)


def suites(name: str, *arguments: str) -> Section:
    """A section of tests that were written for the CPU, with two replicas on the first device."""
    devices = {"TFSTYLE_TEST_DEVICES": f"{KIND}:0#0,{KIND}:0#1"}
    return cases(name, *arguments, limit=200, marker="not distributed and not gpu and not xla", environment=devices)


def ranks(name: str, count: int, *arguments: str) -> Section:
    """A section of tests of several ranks that were written for the CPU, all on the first device."""
    devices = {"TFSTYLE_TEST_DEVICES": ",".join(f"{KIND}:0#{rank}" for rank in range(count))}
    given = [
        argument if argument.startswith("-") or "/" not in argument else f"tests/{argument}.py"
        for argument in arguments
    ]
    return cases(name, *given, limit=240, marker="distributed", environment=devices)


def sections() -> list[Section]:
    """What is run, in the order of importance."""
    interpreted = {"TRITON_INTERPRET": "1"}
    made = [cases("replicas of one process (G1 to G15)", "tests/gpu/cases_replicas.py", limit=120)]
    made.append(cases("steps of such replicas, saving, central storage", "tests/gpu/cases_steps.py", limit=120))
    own = "absent or share"
    for name, chosen in (
        ("RING", "RING"),
        ("a lost one, a shared device", own),
        ("the library", f"not RING and not ({own})"),
    ):
        made.append(cases(f"ranks: {name}", "tests/gpu/cases_ranks.py", "-k", chosen, limit=200))
    if REAL:
        made.append(cases("kernels: bits, 2^31 elements", "tests/gpu/test_triton_on_cuda.py", limit=150, marker="gpu"))
        made.append(cases("prefetched batches", "tests/gpu/test_input_on_cuda.py", limit=60, marker="gpu"))
        made.append(cases("CUDA graphs, torch.compile", "tests/gpu/cases_compiled.py", limit=120))
        made.append(cases("training as users of GPUs do", "tests/gpu/cases_cuda.py", limit=120))
        made.append(suites("suites: variables", "tests/variables"))
        made.append(suites("suites: gradients, train", "tests/gradients", "tests/train"))
        made.append(suites("suites: strategies", "tests/strategies"))
        made.append(suites("suites: input, checkpoint", "tests/input", "tests/checkpoint"))
        made.append(suites("suites: parity", "tests/parity", "-k", "adam and fp64 and not sum"))
        made.append(suites("suites: TensorFlow's programs", "tests/conformance"))
        drawn = "test_programs and not central and not ranks"
        made.append(suites("suites: random programs", "tests/random_programs/test_random_programs.py", "-k", drawn))
        files = ("gradients/test_weights_by_examples", "strategies/test_everyday", "strategies/test_sync_batch_norm")
        made.append(ranks("suites: ranks", 2, *files, "checkpoint/test_checkpoint_ranks"))
        made.append(ranks("suites: models in parts", 4, "model_parallel/test_partition"))
        made.append(ranks("suites: Keras on ranks", 2, "integrations/test_keras_parity", "-k", "mirrored_2_workers]"))
        made.append(foreign("other people's steps, torch.optim", "torch", "steps"))
        made.append(Section("quickstart", ["examples/quickstart.py"], 90.0, pytest=False))
        made.append(measured("steps: speed", "step_overhead.py", "--device", KIND, "--rounds", "1"))
        made.append(measured("sums: speed", "aggregation_gpu.py", "--budget", "60"))
    else:
        made.append(cases("the pretend accelerator itself", "tests/pretend_accelerator/cases_device.py", limit=60))
        kernels = "tests/kernels/test_triton_plan.py"
        made.append(cases("kernels in Triton's interpreter", kernels, limit=120, environment=interpreted))
        made.append(measured("sums: the script", "aggregation_gpu.py", "--smoke", environment=interpreted))
    return made


def foreign(name: str, *groups: str) -> Section:
    """A section of programs that other people wrote, against one device."""
    forms = ["--forms", "replicas", "central", "--together", "--jobs", "4"]
    command = ["tests/foreign/sweep/measure.py", "--group", *groups, *forms]
    return Section(name, command, 240.0, pytest=False, environment={"TFSTYLE_FOREIGN_DEVICE": KIND})


def measured(name: str, script: str, *arguments: str, environment: dict[str, str] | None = None) -> Section:
    """A section of a benchmark."""
    command = [f"benchmarks/{script}", *arguments]
    return Section(name, command, 110.0, pytest=False, measures=True, environment=environment)


def run_all(chosen: list[Section], begin: float) -> Iterator[tuple[Section, tuple[bool, str, float, str]]]:
    """Each section with what ``run`` gave, in their order."""

    def left() -> float:
        return BUDGET - (time.perf_counter() - begin)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        checks = [section for section in chosen if not section.measures]
        yield from zip(checks, pool.map(lambda section: run(section, left()), checks), strict=True)
    for section in chosen:
        if section.measures:
            yield section, run(section, left())


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
    parser.add_argument("--logs", type=Path, help="a folder for all that each section prints")
    parser.add_argument("--only", default="", help="a regular expression: sections to run")
    options = parser.parse_args()
    begin, failed = time.perf_counter(), []
    table = [f"On {machine()}:", "", "| | result | seconds |", "| --- | --- | --- |"]
    chosen = [section for section in sections() if re.search(options.only, section.name)]
    for section, (passed, result, seconds, output) in run_all(chosen, begin):
        table.append(f"| {section.name} | {'' if passed else '**FAILED** '}{result} | {seconds:.0f} |")
        print(table[-1], flush=True)
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / (re.sub(r"\W+", "_", section.name) + ".txt")).write_text(output)
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
