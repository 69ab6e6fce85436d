"""One task: a process in a session of its own, its output, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, TextIO

_KEPT_LINES = 400
_PR_SET_PDEATHSIG = 1
_TRACEBACK = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before the lines of a traceback
# What a task says of the failure of another one, by the last line of its traceback.
_OTHERS_FAULT = re.compile(r"^(\w+\.)*(PeerLostError|DeadlineExceededError|UnavailableError|KeyboardInterrupt)\b")


class UnwrittenError(Exception):
    """What is to be shown cannot be written.

    Args:
        reason: what the system says of it.
    """

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def show(text: str, stream: TextIO) -> None:
    """Prints a line, however long its reader takes; of letters that the stream has not it shows the numbers.

    Raises:
        UnwrittenError: nobody reads the stream any more, or its disk is full, and nobody is told again: the rest of it
            goes nowhere.
    """
    try:
        data = f"{text}\n".encode(stream.encoding, stream.errors or "strict")
    except UnicodeEncodeError:
        data = f"{text}\n".encode(stream.encoding, "backslashreplace")
    try:
        _flush(stream)
        while data:
            try:
                count = stream.buffer.write(data)
            except BlockingIOError as error:
                count = error.characters_written
            data = data[count or 0 :]  # of a stream without a buffer ``None`` says that it takes nothing now
            if data:
                select.select([], [stream], [])
        _flush(stream)
    except OSError as error:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        raise UnwrittenError(error) from error


def _flush(stream: TextIO) -> None:
    while True:
        try:
            stream.flush()
            return
        except BlockingIOError:
            select.select([], [stream], [])


def _die_with_parent() -> None:
    """In the child: ends it should the launcher be killed."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Task:
    """One process of the cluster.

    Args:
        job: its role.
        index: its number in the role.
        command: what it runs.
        environment: its whole environment.

    Attributes:
        name: e.g. ``"worker 0"``.
        ended_at: when it was seen to have ended, or ``None``.
    """

    def __init__(self, job: str, index: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.job, self.index, self.name = job, index, f"{job} {index}"
        self._command, self._environment = list(command), dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._partial: dict[int, bytes] = {}
        self._errors: deque[str] = deque(maxlen=_KEPT_LINES)
        self.ended_at: float | None = None
        self._started_at = 0.0

    def start(self) -> None:
        """Starts the process, anew if it has ended."""
        self._partial, self.ended_at, self._started_at = {}, None, time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        for stream in self.streams():
            os.set_blocking(stream.fileno(), False)

    @property
    def pid(self) -> int:
        """The process id, which is its process group's too."""
        assert self._process is not None
        return self._process.pid

    @property
    def started(self) -> bool:
        """Whether ``start`` was called."""
        return self._process is not None

    def seconds(self) -> float:
        """How long it has run."""
        return (self.ended_at or time.monotonic()) - self._started_at

    @property
    def trains(self) -> bool:
        """Whether it belongs to the training proper."""
        return self.job in ("chief", "worker")

    def code(self) -> int | None:
        """The exit code, ``None`` while it runs; 128 plus the signal's number if a signal ended it."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        if self.ended_at is None:
            self.ended_at = time.monotonic()
        return 128 - code if code < 0 else code

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the task and all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def streams(self) -> list[IO[bytes]]:
        """Where its output comes out."""
        if self._process is None:
            return []
        return [stream for stream in (self._process.stdout, self._process.stderr) if stream is not None]

    def forward(self, stream: IO[bytes]) -> bool:
        """Shows what has come out.

        Returns:
            Whether more may come.

        Raises:
            UnwrittenError: what is shown cannot be written, or nobody reads it.
        """
        assert self._process is not None
        try:
            data = os.read(stream.fileno(), 65536)
        except BlockingIOError:
            return True
        number = stream.fileno()
        *lines, rest = (self._partial.get(number, b"") + data).split(b"\n")
        if not data and rest:
            lines, rest = [*lines, rest], b""
        self._partial[number] = rest
        is_error = stream is self._process.stderr
        for line in lines:
            # A progress bar writes over its line: the last state counts.
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            if is_error:
                self._errors.append(_RANK.sub("", text))
            show(f"[{self.name}] {text}", sys.stderr if is_error else sys.stdout)
        return bool(data)

    def drain(self) -> None:
        """Shows the rest, without waiting for processes that hold the stream open, and closes it."""
        for stream in self.streams():
            if not stream.closed:
                with contextlib.suppress(OSError, UnwrittenError):
                    while select.select([stream], [], [], 0)[0] and self.forward(stream):
                        pass
                stream.close()

    def traceback(self) -> str | None:
        """The last Python traceback that it printed."""
        lines = list(self._errors)
        starts = [place for place, line in enumerate(lines) if line.startswith(_TRACEBACK)]
        if not starts:
            return None
        first = starts[-1]
        # Chained exceptions belong together.
        while len(starts) > 1 and _chained(lines[starts[-2] : first]):
            starts.pop()
            first = starts[-1]
        return "\n".join(lines[first:]).rstrip()

    def blames_others(self) -> bool:
        """Whether it only failed because another one did."""
        text = self.traceback() or ""
        last = [line for line in text.splitlines() if line and not line.startswith(" ")]
        return any(_OTHERS_FAULT.match(line) for line in last[1:])


def _chained(lines: Sequence[str]) -> bool:
    return any("the direct cause of the following" in line or "another exception occurred" in line for line in lines)
