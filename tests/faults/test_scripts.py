"""Whole programs: Ctrl-C, signals, the debugger."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tfstyle_dist.core.launch_env import LAUNCHER_VARIABLES

pytestmark = pytest.mark.timeout(90)

PRELUDE = """
import sys, threading, time
import torch
import tfstyle_dist as td

def replica_id():
    return td.get_replica_context().replica_id_in_sync_group
"""


class Script:
    """A program in a process of its own."""

    def __init__(self, path: Path, environment: dict[str, str], stdin: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(path)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.output = ""

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        while text not in self.output:
            piece = self.process.stdout.readline()
            assert piece, f"the script ended without saying {text!r}:\n{self.output}"
            self.output += piece

    def end(self, stdin: str | None = None, timeout: float = 60.0) -> int:
        rest, _ = self.process.communicate(stdin, timeout=timeout)
        self.output += rest
        return self.process.returncode


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    scripts: list[Script] = []

    def run(source: str, stdin: bool = False, **environment: str) -> Script:
        path = tmp_path / f"script{len(scripts)}.py"
        path.write_text(PRELUDE + source)
        base = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
        channel = subprocess.PIPE if stdin else subprocess.DEVNULL
        scripts.append(Script(path, {**base, "OMP_NUM_THREADS": "1", **environment}, channel))
        return scripts[-1]

    yield run
    for script in scripts:
        script.process.kill()
        script.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in_user_code", "waiting_for_the_other"])
def test_ctrl_c(start: Any, where: str) -> None:
    script = start(
        f"""
strategy = td.MirroredStrategy(["cpu:0", "cpu:1"])
where = {where!r}

def step():
    if replica_id() == 0:
        print("ready", flush=True)
        if where == "in_user_code":
            while True:
                time.sleep(0.1)
    elif where == "waiting_for_the_other":
        while True:
            time.sleep(0.1)
    td.get_replica_context().all_reduce("SUM", torch.ones(1))

try:
    strategy.run(step)
except KeyboardInterrupt as error:
    print("interrupted")
    raise
"""
    )
    script.wait_for("ready")
    script.process.send_signal(signal.SIGINT)
    code = script.end(timeout=40)
    assert "interrupted" in script.output, script.output
    assert "KeyboardInterrupt" in script.output
    assert code in (1, 130, -signal.SIGINT)


def test_sigterm(start: Any) -> None:
    script = start(
        """
strategy = td.MirroredStrategy(["cpu:0", "cpu:1"])

def step():
    if replica_id() == 0:
        print("ready", flush=True)
    while True:
        time.sleep(0.1)

strategy.run(step)
"""
    )
    script.wait_for("ready")
    script.process.terminate()
    assert script.end(timeout=40) == -signal.SIGTERM


@pytest.mark.slow
def test_end_of_program_with_an_abandoned_replica(start: Any) -> None:
    script = start(
        """
strategy = td.MirroredStrategy(["cpu:0", "cpu:1"])
try:
    strategy.run(lambda: replica_id() == 0 or threading.Event().wait())
except TimeoutError as error:
    print("gave up:", type(error).__name__)
""",
        TFSTYLE_TIMEOUT_SECONDS="1",
    )
    assert script.end() == 0, script.output
    assert "gave up: DeadlineExceededError" in script.output


def test_runs_in_functions_of_atexit(start: Any) -> None:
    """The threads of replicas have ended by then, and others take their place."""
    script = start(
        """
import atexit

def final():
    print("sum", strategy.run(lambda: td.get_replica_context().all_reduce("SUM", torch.tensor(1.0))).values)

atexit.register(final)
atexit.register(lambda: final())
strategy = td.MirroredStrategy(["cpu:0", "cpu:1"])
strategy.run(lambda: None)
""",
        TFSTYLE_TIMEOUT_SECONDS="5",
    )
    assert script.end() == 0, script.output
    assert script.output.count("sum (tensor(2.), tensor(2.))") == 2, script.output


@pytest.mark.slow
def test_breakpoint_in_a_replica(start: Any) -> None:
    """The other replica waits longer than the deadline while a person sits at the prompt."""
    script = start(
        """
strategy = td.MirroredStrategy(["cpu:0", "cpu:1"])

def step():
    if replica_id() == 0:
        print("at the prompt", flush=True)
        breakpoint()
    return td.get_replica_context().all_reduce("SUM", torch.tensor(1.0))

print("sum", strategy.run(step).values[0].item())
""",
        stdin=True,
        TFSTYLE_TIMEOUT_SECONDS="2",
    )
    script.wait_for("at the prompt")
    with contextlib.suppress(subprocess.TimeoutExpired):
        script.process.wait(4)  # two deadlines long
    assert script.end("p 6 * 7\nc\n") == 0, script.output
    assert "42" in script.output
    assert "sum 2.0" in script.output
