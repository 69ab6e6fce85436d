"""One rank process, as its parent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tfstyle_dist.core.processes import signal_name
from tfstyle_dist.testing import messages, processes

# A test must not depend on the cluster that the shell happens to be in.
_CLUSTER_VARIABLES = {
    *("TF_CONFIG", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"),
    *(f"{group}{number}" for group in ("", "LOCAL_", "GROUP_", "ROLE_") for number in ("RANK", "WORLD_SIZE")),
}
_CLUSTER_PREFIXES = ("TORCHELASTIC_", "SLURM_")
_MAX_OUTPUT_BYTES = 100_000
_STACK_PATIENCE = 10.0
_STACK_PAUSE = 0.5  # on a busy machine a process may pause in the middle of writing its stacks
_PROCESS_VARIABLE = "TFSTYLE_TESTING_PROCESS"


class RankProcess:
    """A process that runs the test bodies of one rank.

    Args:
        rank: The rank that it plays in every test.
        directory: An existing directory for its output, which may be used by one process only.
        cwd: Its working directory.

    Raises:
        OSError: If the process cannot be started.
    """

    def __init__(self, rank: int, directory: Path, cwd: Path) -> None:
        self.rank = rank
        # In its environment and in that of all its descendants.
        self._token, self._killed = uuid.uuid4().hex, False
        self.directory = directory
        # The test files that it was asked to collect.
        self.files: set[str] = set()
        # Whether the process has closed its end of the pipe; it may live on.
        self.hung_up = False
        # What the process before it printed, where a test restarted the rank.
        self.earlier_output: dict[str, str] = {}
        self._asked = 0.0
        self._marks = {"stdout": 0, "stderr": 0, "stacks": 0}
        for name in self._marks:
            self._file(name).touch()
        self.connection, theirs = Pipe(duplex=True)
        try:
            with self._file("stdout").open("ab") as stdout, self._file("stderr").open("ab") as stderr:
                self._process = subprocess.Popen(
                    [sys.executable, *_interpreter_flags(), "-u", "-c", self._program(theirs)],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=cwd,
                    env=_environment(rank, self._token),
                    pass_fds=[theirs.fileno()],
                    # So that it can be killed with its children and without this session.
                    start_new_session=True,
                )
        finally:
            theirs.close()

    def _program(self, connection: Connection[Any, Any]) -> str:
        stacks = str(self._file("stacks"))
        # The parent's import path, because `-c` puts the working directory first and a plain pytest does not.
        return (
            f"import sys; sys.path[:] = {sys.path!r}; from tfstyle_dist.testing.rank_main import main; "
            f"main({connection.fileno()}, {os.getpid()}, {stacks!r})"
        )

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.txt"

    @property
    def pid(self) -> int:
        """The process id, valid until `kill` has returned."""
        return self._process.pid

    def exited(self) -> str | None:
        """Says how the process ended, or returns None while it lives.

        Where there is ``os.waitid`` the process stays a zombie, so that its id cannot be given to somebody else.
        """
        if self._process.returncode is None and hasattr(os, "waitid"):  # macOS has it from Python 3.13 on
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is None:
                return None
            if result.si_code == os.CLD_EXITED:
                return f"exit code {result.si_status}"
            return f"signal {signal_name(result.si_status)}"
        code = self._process.poll()
        if code is None:
            return None
        return f"exit code {code}" if code >= 0 else f"signal {signal_name(-code)}"

    def send(self, message: object) -> None:
        """Sends a message; a process that is gone is noticed by whoever waits for the answer."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def received(self) -> list[object]:
        """Returns the messages that have come in."""
        messages: list[object] = []
        try:
            while self.connection.poll():
                messages.append(self.connection.recv())
        except (EOFError, OSError):
            self.hung_up = True
        return messages

    def mark_output(self) -> None:
        """Makes `new_output` start here."""
        self.earlier_output = {}
        for name in self._marks:
            self._marks[name] = self._file(name).stat().st_size

    def new_output(self, name: str) -> str:
        """Returns what came since `mark_output`, of a very long output the end.

        Args:
            name: `stdout`, `stderr` or `stacks`.
        """
        path = self._file(name)
        start = max(self._marks[name], path.stat().st_size - _MAX_OUTPUT_BYTES)
        with path.open("rb") as stream:
            stream.seek(start)
            text = stream.read().decode(errors="replace")
        if start != self._marks[name]:
            text = "[the beginning was cut off]\n" + text
        return self.earlier_output.get(name, "") + text

    def request_stacks(self) -> None:
        """Makes the process write the Python stacks of all its threads, even if it is stopped."""
        self._asked = time.monotonic()
        # In this order, so that a stopped process answers from where it was stopped.
        processes.send([self.pid], messages.STACKS_SIGNAL)
        processes.send([self.pid], signal.SIGCONT)

    def wait_for_stacks(self) -> str:
        """Returns the stacks that `request_stacks` asked for, or says that none came."""
        text, changed = "", self._asked
        while (now := time.monotonic()) < self._asked + _STACK_PATIENCE and self.exited() is None:
            previous, text = text, self.new_output("stacks")
            if text != previous:
                changed = now
            elif text and now > changed + _STACK_PAUSE:
                break
            time.sleep(0.1)
        return self.new_output("stacks") or "(the rank did not answer the request for its stacks)\n"

    def wait(self, patience: float) -> bool:
        """Waits for the end of the process without taking its exit status; returns whether it has ended."""
        return not processes.left_after(patience, lambda: self.exited() is None)

    def kill(self) -> None:
        """Kills the process and all its descendants; does nothing if that was done."""
        if not self._killed:
            self._killed = True
            # A child with a session and an environment of its own is known by its parent alone, while that lives.
            family = processes.tree(self.pid) - {self.pid}
            processes.kill_group(self.pid)
            processes.send(family, signal.SIGKILL)
            self._process.wait()
            processes.kill_with_environment(_PROCESS_VARIABLE, self._token)
        self.connection.close()


def _interpreter_flags() -> list[str]:
    """The options of the Python that runs the session, such as `-O` and `-W error`."""
    # What multiprocessing starts its processes with; there is no public name for it.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def _environment(rank: int, token: str) -> Mapping[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _CLUSTER_VARIABLES and not name.startswith(_CLUSTER_PREFIXES)
    }
    environment.pop("PYTEST_CURRENT_TEST", None)
    environment.update(
        {
            _PROCESS_VARIABLE: token,
            messages.RANK_VARIABLE: str(rank),
            # Thread pools are sized when torch is imported; the ranks of a test share the machine.
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
    )
    return environment
