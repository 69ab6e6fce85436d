"""A launcher under test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Launch:
    """A launcher under test."""

    def __init__(self, program: Path, options: list[str], marker: str) -> None:
        self.marker = marker
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tfstyle_dist.launch", "--grace", "30", *options, str(program), marker],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": "7", "WORLD_SIZE": "9"},
        )

    def end(self, timeout: float = 60) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def wait_for(self, count: int) -> None:
        """Returns when so many tasks have said that they are ready."""
        assert self.process.stdout is not None
        while count:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            count -= "ready" in line

    def left(self) -> list[str]:
        """Processes of this cluster that still live; those that were killed get some time to go."""
        end = time.monotonic() + 20
        while (found := self._living()) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def _living(self) -> list[str]:
        found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        return [line for line in found.splitlines() if self.marker in line and "defunct" not in line]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    started: list[Launch] = []

    def start(source: str, *options: str) -> Launch:
        program = tmp_path / f"program{len(started)}.py"
        program.write_text("import json, os, signal, sys, time\n" + TASK + source)
        started.append(Launch(program, list(options), f"marker-{os.getpid()}-{tmp_path.name}-{len(started)}"))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
        assert not one.left()


TASK = """
config = json.loads(os.environ["TF_CONFIG"])
job, index = config["task"]["type"], config["task"]["index"]
"""
