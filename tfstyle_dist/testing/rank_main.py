"""The program of a rank process: it runs the tests that its parent asks for."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from tfstyle_dist.testing import messages
from tfstyle_dist.testing.rank_session import RankSession, problem_of

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent_pid: int, stacks_path: str) -> None:
    """Serves one parent until it says goodbye or is gone.

    Args:
        descriptor: The file descriptor of this end of the pipe.
        parent_pid: The process that must be the parent.
        stacks_path: The file that `STACKS_SIGNAL` writes the stacks of all threads to.
    """
    os.set_inheritable(descriptor, False)
    _die_with_parent(parent_pid)
    # pytest is already imported, but no conftest and no test module: a hang in those must be seen too.
    with open(stacks_path, "a", encoding="utf-8") as stacks:
        faulthandler.register(messages.STACKS_SIGNAL, file=stacks, all_threads=True)
        with contextlib.suppress(EOFError):
            _serve(Connection(descriptor))
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips the threads and exit handlers that a test body may have left, which could hang.
    os._exit(0)


def _die_with_parent(parent_pid: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the line above took effect.
    if os.getppid() != parent_pid:
        os._exit(1)


def _serve(connection: Connection[Any, Any]) -> None:
    start = connection.recv()
    assert isinstance(start, messages.Start), start
    connection.send(messages.Ready())
    message = connection.recv()
    num_sessions = 0
    while not isinstance(message, messages.Exit):
        assert isinstance(message, messages.Collect), message
        num_sessions += 1
        # pytest empties a base directory that exists, and the files of failed tests are worth keeping.
        options = {**start.options, "basetemp": f"{start.options['basetemp']}-{num_sessions}"}
        session = RankSession(connection, message)
        problem = problem_of(lambda: session.run(replace(start, options=options)))  # noqa: B023
        if not session.began:
            connection.send(messages.Ready(problem or "pytest ended before it collected the test, see stderr"))
        elif session.next_message is None:
            # In the middle of a test, after which nothing in this process can be relied on.
            sys.stderr.write(problem or "pytest ended in the middle of a test\n")
            os._exit(1)
        message = session.next_message or connection.recv()
