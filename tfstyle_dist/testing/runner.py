"""Running a script as a user would, alone or under torchrun, with a time limit that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tfstyle_dist.core.processes import lives
from tfstyle_dist.testing import processes

__all__ = ["CompletedScript", "ScriptTimeoutError", "run_script"]

_SCRIPT_VARIABLE = "TFSTYLE_TESTING_SCRIPT"
_STACK_PATIENCE = 10.0


@dataclass(frozen=True)
class CompletedScript:
    """A script that has ended by itself.

    Attributes:
        returncode: Its exit code; negative is the number of the signal that ended it.
        stdout: What it and its workers printed.
        stderr: What it and its workers printed to standard error.
    """

    returncode: int
    stdout: str
    stderr: str


class ScriptTimeoutError(TimeoutError):
    """A script did not end in time; its processes were killed.

    Attributes:
        stdout: What it had printed.
        stderr: What it had printed to standard error, with the stacks of its Python threads.
    """

    def __init__(self, message: str, stdout: str, stderr: str) -> None:
        super().__init__(f"{message}\n--- stdout ---\n{stdout}\n--- stderr, with the stacks ---\n{stderr}")
        self.stdout = stdout
        self.stderr = stderr


def run_script(
    argv: Sequence[str | os.PathLike[str]],
    nproc: int = 1,
    timeout: float = 120.0,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> CompletedScript:
    """Runs a Python script and waits for its end.

    Args:
        argv: The script and its arguments.
        nproc: How many workers. With 1 the script runs under plain Python, with more under
            `torch.distributed.run --standalone`.
        timeout: Seconds after which the stacks of all its processes are dumped and all of them are killed.
        env: Environment variables to add to the present ones; None as a value removes one.
        cwd: The working directory, by default the present one.

    Returns:
        The exit code and the output.

    Raises:
        ScriptTimeoutError: If the script has not ended in time.
        ValueError: If `argv` is empty, `nproc` is below 1 or `timeout` is not above 0.

    Example:
        >>> run_script(["examples/one_device.py", "--steps", "2"]).returncode
        0
    """
    arguments = [os.fspath(argument) for argument in argv]
    if not arguments:
        raise ValueError("run_script got an empty argv; write the script and its arguments, like ['train.py']")
    if nproc < 1:
        raise ValueError(f"run_script got nproc={nproc}; write at least 1")
    if not timeout > 0:
        raise ValueError(f"run_script got timeout={timeout}; write a number of seconds above 0")
    command = [sys.executable]
    if nproc > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    token = uuid.uuid4().hex
    # Files, because a pipe that a forgotten grandchild holds open would never end.
    with tempfile.TemporaryDirectory(prefix="tfstyle_dist-script-") as directory:
        stdout, stderr = Path(directory, "stdout"), Path(directory, "stderr")
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=cwd,
                env=_environment(env, token),
                start_new_session=True,
            )
        returncode = _wait(process, timeout, token)
        output = stdout.read_text(errors="replace"), stderr.read_text(errors="replace")
    if returncode is None:
        raise ScriptTimeoutError(f"{' '.join(arguments)} did not end in {timeout:g} s", *output)
    return CompletedScript(returncode, *output)


def _environment(changes: Mapping[str, str | None] | None, token: str) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, value in (changes or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    # The fault handler answers SIGABRT with the stacks of all threads, without any help of the script.
    return {**environment, "PYTHONFAULTHANDLER": "1", _SCRIPT_VARIABLE: token}


def _wait(process: subprocess.Popen[bytes], timeout: float, token: str) -> int | None:
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        _dump_stacks(process.pid, token)
        return None
    finally:
        # torchrun starts its workers in sessions of their own, so the process group is not all of it.
        if process.returncode is None:
            processes.kill_group(process.pid)
        processes.kill_with_environment(_SCRIPT_VARIABLE, token)
        process.wait()


def _dump_stacks(leader: int, token: str) -> None:
    others = processes.with_environment(_SCRIPT_VARIABLE, token) - {leader}
    processes.send(others, signal.SIGCONT)
    # torchrun would end its workers before they have answered.
    processes.send([leader], signal.SIGSTOP)
    # One after the other: stacks that several processes write at once cut each other up.
    for pid in (*sorted(others), leader):
        processes.send([pid], signal.SIGABRT)
        processes.send([pid], signal.SIGCONT)
        processes.left_after(_STACK_PATIENCE, partial(lives, pid))
