"""`run_script`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfstyle_dist.testing import processes, runner
from tfstyle_dist.testing.runner import ScriptTimeoutError, run_script


def _script(folder: Path, source: str) -> Path:
    path = folder / "script.py"
    path.write_text(source)
    return path


def _begin_limit_when(ready: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine processes take long to start."""
    wait = runner._wait

    def begin_later(process: Any, timeout: float, token: str) -> int | None:
        end = time.monotonic() + 100
        while not ready() and time.monotonic() < end:
            time.sleep(0.05)
        return wait(process, timeout, token)

    monkeypatch.setattr(runner, "_wait", begin_later)


def test_plain_script(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import os, sys\nprint(sys.argv[1:], os.environ['GIVEN'], 'HOME' in os.environ)\nsys.exit('bad end')\n",
    )
    done = run_script([script, "--steps", "2"], env={"GIVEN": "yes", "HOME": None})
    assert done.returncode == 1
    assert done.stdout == "['--steps', '2'] yes False\n"
    assert "bad end" in done.stderr


def test_torchrun_script(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        # In one piece, because the workers share one file.
        "import os, sys\nsys.stdout.write('rank {RANK} of {WORLD_SIZE}\\n'.format(**os.environ))\n",
    )
    done = run_script([script], nproc=2, timeout=100)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize("nproc", [1, 2])
def test_hanging_script_is_dumped_and_killed(tmp_path: Path, nproc: int, monkeypatch: pytest.MonkeyPatch) -> None:
    script = _script(
        tmp_path,
        "import os, subprocess, sys, time\n"
        "def hang():\n    time.sleep(3600)\n"
        "child = subprocess.Popen(['sleep', '3600'], start_new_session=True)\n"
        "for pid in (child.pid, os.getpid()):\n"
        "    open(os.path.join(os.path.dirname(__file__), f'pid-{pid}'), 'w').close()\n"
        "hang()\n",
    )
    _begin_limit_when(lambda: len(list(tmp_path.glob("pid-*"))) == 2 * nproc, monkeypatch)
    with pytest.raises(ScriptTimeoutError, match="did not end in 2 s") as caught:
        run_script([script], nproc=nproc, timeout=2.0)
    assert caught.value.stderr.count("in hang") == nproc
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2 * nproc
    assert [pid for pid in pids if processes.state(pid) not in ("", "Z")] == []


def test_leftover_processes_of_a_good_script_are_killed(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        "import subprocess\nprint(subprocess.Popen(['sleep', '3600'], start_new_session=True).pid)\n",
    )
    done = run_script([script])
    assert processes.state(int(done.stdout)) in ("", "Z")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"argv": []}, "empty argv"),
        ({"argv": ["x.py"], "nproc": 0}, "nproc=0; write at least 1"),
        ({"argv": ["x.py"], "timeout": 0}, "timeout=0; write"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_script(**arguments)  # type: ignore[arg-type]
