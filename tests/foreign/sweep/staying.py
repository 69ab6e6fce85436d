"""Processes that run one case after the other, where it takes long to begin: on a device.

On a pretend device they are forked. On a real one they are started, ``python staying.py FD GROUP...``, and import the
packages themselves: some of these begin with CUDA when they are imported, and a fork could not use it then.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch

Answer = tuple[str, Any]
"""("values", a dict of names and tensors), or ("raised" or "hang", what was said)."""
Asked = tuple[str, str, str, int]
"""The title of a case, the form, the data type, into how many shares one device divides the batch."""
Execute = Callable[[str, str, str, int], dict[str, Any]]


def said_of(error: BaseException) -> str:
    """What a user reads of an error: the notes of the package are part of it."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


class _TooLong(BaseException):
    """A case has not ended within its limit."""


class Staying:
    """Processes that stay. They end with the one that made this, and begin again after a case that hangs.

    Args:
        execute: runs what is asked for.
        grace: seconds that they have to say where they hang.
        groups: of cases, for processes that import these themselves; none: they are forked.
    """

    def __init__(self, execute: Execute, grace: float, groups: Sequence[str] = ()) -> None:
        self._execute, self._grace, self.groups = execute, grace, groups
        self._ends: list[Connection[Any, Any]] = []
        self._pids: list[int] = []

    def answers(self, asked: Asked, environments: Sequence[Mapping[str, str]], limit: float) -> list[Answer]:
        """What each of as many processes as there are environments answers."""
        while len(self._pids) < len(environments):
            self._begin()
        ends = self._ends[: len(environments)]
        for end, environment in zip(ends, environments, strict=True):
            with contextlib.suppress(OSError):  # it has ended, which is seen below
                end.send((asked, dict(environment), limit))
        answers: list[Answer] = []
        for end in ends:
            try:
                there = end.poll(limit + self._grace)
                answers.append(torch.load(io.BytesIO(end.recv_bytes()), weights_only=False) if there else _silent())
            except (EOFError, OSError):
                answers.append(_silent())
        if any(answer == _silent() for answer in answers):
            self._end()
        return answers

    def _begin(self) -> None:
        own, other = Pipe()
        if self.groups:
            command = [sys.executable, __file__, str(other.fileno()), *self.groups]
            pid = subprocess.Popen(command, pass_fds=[other.fileno()], stdout=subprocess.DEVNULL).pid
        else:
            pid = os.fork()
        if pid:
            other.close()
            self._ends.append(own)
            self._pids.append(pid)
            if self.groups:
                own.recv()  # has imported everything
            return
        try:
            for end in (*self._ends, own):
                end.close()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            self.serve(other)
        finally:
            os._exit(0)

    def serve(self, end: Connection[Any, Any]) -> None:
        """Answers what it is asked until the other end is closed."""
        usual = dict(os.environ)
        with contextlib.suppress(EOFError, OSError):
            while True:
                asked, environment, limit = end.recv()
                os.environ.clear()
                os.environ.update(usual | environment)
                said = io.BytesIO()
                torch.save(self._answer(asked, limit), said)
                end.send_bytes(said.getvalue())

    def _answer(self, asked: Asked, limit: float) -> Answer:
        """Runs a case in this process; what it leaves behind in torch, the next case finds."""
        random.seed(0)
        np.random.seed(0)
        signal.signal(signal.SIGALRM, _stop)
        signal.alarm(int(limit))
        try:
            with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                warnings.simplefilter("ignore")
                return "values", self._execute(*asked)
        except _TooLong as error:
            where = [
                frame for frame in traceback.extract_tb(error.__traceback__) if "/lib/python" not in frame.filename
            ]
            said = " ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(where))
            return "hang", f"not over after {limit:.0f} s: {said[:500]}"
        except BaseException as error:
            return "raised", said_of(error)
        finally:
            signal.alarm(0)
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)

    def _end(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for end in self._ends:
            end.close()
        self._ends, self._pids = [], []


def _silent() -> Answer:
    return "hang", "the process ended, or said nothing"


def _stop(*_: Any) -> None:
    raise _TooLong


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import forms
    import measure

    measure.fill(sys.argv[2:], installed=True)
    there: Connection[Any, Any] = Connection(int(sys.argv[1]))
    there.send(None)
    forms.STAYING.serve(there)
    os._exit(0)
