"""TPUStrategy on the CPU's virtual XLA devices; each program in a process of its own that can be killed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tfstyle_dist.testing.runner import CompletedScript, run_script

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
TIMEOUT = 280

pytestmark = [
    pytest.mark.xla,
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
]


def run(*argv: str | Path, devices: int = 4, nproc: int = 1) -> CompletedScript:
    env = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "XLA_USE_SPMD": None}
    return run_script(list(argv), nproc=nproc, timeout=TIMEOUT, env=env)


def assert_ok(result: CompletedScript, *expected: str) -> None:
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("ok ")] == [f"ok {name}" for name in expected]
    assert "done" in lines


def test_one_replica_for_each_device() -> None:
    names = re.findall(r"^    (\w+),$", (HERE / "replica_program.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) >= 8
    assert_ok(run(HERE / "replica_program.py"), *names)


def test_one_program_over_all_devices() -> None:
    assert_ok(run(HERE / "spmd_program.py"), "training", "recompilations", "refusals", "a divided model")


def test_quickstart_with_one_replica_for_each_device() -> None:
    result = run(HERE / "replica_program.py", "quickstart")
    assert_ok(result, "the_quickstart_agrees_with_one_device")
    check_quickstart(result)
    assert "4 replica(s)" in result.stdout


def test_quickstart_with_one_program_over_all_devices() -> None:
    result = run(EXAMPLES / "quickstart.py", "--strategy", "tpu")
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    check_quickstart(result)
    assert "one program over 4 XLA devices" in result.stdout


def check_quickstart(result: CompletedScript) -> None:
    (parity,) = re.findall(r"max\|dw\|/max\|w\| = (\S+)", result.stdout)
    assert float(parity) <= 1e-5


def test_torchrun_is_refused() -> None:
    result = run(HERE / "under_torchrun.py", nproc=2)
    assert result.returncode != 0
    assert "WORLD_SIZE=2, but XLA sees 1 replica(s)" in result.stderr
    assert "torch_xla.launch(main)" in result.stderr
