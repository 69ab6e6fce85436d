"""Processes that a rank forks while threads of other libraries come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfstyle_dist.testing.runner import run_script

FORKING = Path(__file__).with_name("forking.py")


@pytest.mark.timeout(180)
def test_they_do_not_stay_in_the_fork() -> None:
    """In Python 3.11 about every fourth did, beside a thread that does nothing else; now hardly one."""
    pytest.importorskip("llvmlite")
    done = run_script([FORKING], nproc=2, timeout=150)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count(" stayed") == 2
