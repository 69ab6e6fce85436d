"""How a rank process ends, and what it leaves behind."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from until import wait_until

from tfstyle_dist.testing import processes
from tfstyle_dist.testing.rank_process import RankProcess


class WithAChild(RankProcess):
    """Ends by itself at once; its child does not."""

    def _program(self, connection: Connection[Any, Any]) -> str:
        return (
            "import os, subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            "print(child.pid, flush=True)\n"
            "os._exit(3)"
        )


@pytest.fixture(params=["this system", "without waitid and /proc"])
def _system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has ``os.waitid`` from Python 3.13 on, and never a /proc."""
    if request.param != "this system":
        monkeypatch.delattr(os, "waitid")
        monkeypatch.setattr(processes, "_PROC", Path("/nowhere"))


@pytest.mark.usefixtures("_system")
def test_a_process_that_ended_by_itself_leaves_no_child(tmp_path: Path) -> None:
    process = WithAChild(0, tmp_path, tmp_path)
    wait_until(lambda: process.exited() is not None)
    assert process.exited() == "exit code 3"
    child = int((tmp_path / "stdout.txt").read_text())
    process.kill()

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    wait_until(is_gone)
    assert process.exited() == "exit code 3"
