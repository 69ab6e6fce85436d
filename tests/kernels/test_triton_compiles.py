"""The kernels as compiled for an H100 or H200: no registers spilled, 16 bytes moved at a time."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tfstyle_dist.testing.runner import run_script

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_compiled_for_hopper(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {"TRITON_INTERPRET": None, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    result = run_script([script, tmp_path], timeout=150, env=environment)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found) >= 10
    for variant, numbers in found.items():
        assert numbers["stack"] == 0, variant
        # Four programs of 128 threads and more on one multiprocessor.
        assert numbers["registers"] <= 128, variant
        assert numbers["wide_loads"] >= 8, variant
        assert numbers["wide_stores"] >= 1, variant
