"""What needs no more than Python, torch and ZeroMQ runs on a system that is no Linux, here a pretended one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tfstyle_dist.testing.runner import run_script

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS_ON_RANKS = """
import pytest
import torch
import torch.distributed as dist


@pytest.mark.distributed(workers=2, backend="gloo", timeout=60)
def test_sum(process_group, rank):
    total = torch.full((3,), float(rank))
    dist.all_reduce(total)
    assert total.eq(1.0).all()


@pytest.mark.distributed(workers=2, may_die=(1,), deadline=5)
def test_death(process_group, rank, ranks):
    if rank == 1:
        ranks.kill(1)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))
"""


def run(*argv: str, nproc: int = 1) -> str:
    """Runs a program there; returns what it printed."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"TFSTYLE_PRETEND_SYSTEM": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": None}
    result = run_script(argv, nproc=nproc, timeout=150, env=env, cwd=ROOT)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def test_what_linux_alone_has_is_not_there(tmp_path: Path) -> None:
    assert sys.platform == "linux"
    program = tmp_path / "look.py"
    program.write_text("import os, sys\nprint(sys.platform, hasattr(os, 'eventfd'), os.path.exists('/proc'))\n")
    assert run(str(program)).split() == ["darwin", "False", "False"]


def test_replicas_of_one_process_and_of_two() -> None:
    for output in (run("examples/quickstart.py", "--replicas", "2"), run("examples/quickstart.py", nproc=2)):
        (apart,) = re.findall(r"^parity with one device after 50 steps: .* = (\S+)$", output, re.MULTILINE)
        assert float(apart) < 1e-5


def test_workers_of_the_launcher(tmp_path: Path) -> None:
    loop = ["examples/multi_worker_loop.py", "--directory", str(tmp_path), "--epochs", "1"]
    run("-m", "tfstyle_dist.launch", "--workers", "2", *loop)
    assert any(tmp_path.iterdir())


def test_central_storage_in_one_process() -> None:
    assert "memory of this process: not known" in run("examples/central_storage.py", "--replicas", "2")


def test_parameter_servers() -> None:
    (accuracy,) = re.findall(r"test accuracy (\S+) after 1000 steps", run("examples/parameter_server.py"))
    assert float(accuracy) > 0.95


def test_tests_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "test_ranks.py").write_text(TESTS_ON_RANKS, "utf-8")
    assert "2 passed" in run("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(tmp_path))


def test_the_doctor() -> None:
    assert "only Linux is tested" in run("-m", "tfstyle_dist.doctor")
