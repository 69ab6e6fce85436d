"""What is said of a torch that the tests were not run with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfstyle_dist.core import torch_releases
from tfstyle_dist.testing.runner import run_script


@pytest.mark.parametrize(("version", "lines"), [("2.99.0a0+git1", 1), ("2.15.0+cpu", 0), ("2.9.1", 0)])
def test_a_newer_torch_is_named_once(version: str, lines: int, tmp_path: Path) -> None:
    program = (
        f"import torch, tfstyle_dist as t\ntorch.__version__ = {version!r}\nt.MirroredStrategy, t.Variable, t.train"
    )
    result = run_script(["-c", program], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stderr.splitlines() if "make canary" in line]
    assert len(said) == lines
    if said:
        assert f"torch {version} is newer than the newest that tfstyle_dist was tested with (2.15)" in said[0]


def test_versions_are_compared_by_numbers() -> None:
    assert torch_releases.release("2.9.1+cu128") == torch_releases.OLDEST < torch_releases.NEWEST
    assert torch_releases.release("2.16a0") == (2, 16)
    assert torch_releases.release("3.0.0.dev20270101") > torch_releases.NEWEST
    torch_releases.warn_if_untested("2.9.1")
