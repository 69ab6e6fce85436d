"""Runs recorded programs on the facade in a process of its own and compares their results with TensorFlow's."""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOLERANCES = argparse.Namespace(rtol=1e-5, atol=5e-6, mode="class")


def load_compare() -> Any:
    """The module compare.py of the recorded set."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    import compare

    return compare


@functools.cache
def golden() -> Mapping[str, Any]:
    """TensorFlow's results: ``{category: {case: result}}``."""
    return json.loads((HERE / "golden.json").read_text())["cases"]  # type: ignore[no-any-return]


def record(only: Sequence[str], timeout: float = 600) -> Mapping[str, Any]:
    """Our results of some categories or cases.

    The programs run in forked children of a fresh interpreter: a child forked after its parent ran a parallel
    operation would hang on its own next one.
    """
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "candidate.json"
        command = [sys.executable, "record.py", "--facade", str(HERE / "facade.py"), "--out", str(out), "--only", *only]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=timeout, env=environment)
        if done.returncode != 0 or not out.exists():
            raise RuntimeError(f"record.py failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return json.loads(out.read_text())["cases"]  # type: ignore[no-any-return]


def differences(category: str, case: str, candidate: Any) -> dict[str, str]:
    """The leaves that disagree with the golden, as text by place; empty when the case agrees."""
    compare = load_compare()
    expected, out = golden()[category][case], []
    compare.leaves(expected, candidate, "", out, TOLERANCES)
    return {
        f"{category}.{case}{path}": (
            f"{category}.{case}{path}\n    TensorFlow {json.dumps(g)[:300]}\n    here       {json.dumps(c)[:300]}"
        )
        for path, good, g, c in out
        if not good and not compare.accident(category, case, path)
    }
