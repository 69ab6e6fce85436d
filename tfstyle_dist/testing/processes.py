"""Finding and ending processes, with nothing but /proc.

On a system without /proc the searches find nothing; process groups are then the only means of cleaning up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from tfstyle_dist.core.processes import link_target, lives, stat_fields, state

_PROC = Path("/proc")
Left = TypeVar("Left")


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped by a signal."""
    return state(pid) in ("T", "t")


def all_pids() -> list[int]:
    """Returns the ids of all processes that can be seen."""
    try:
        return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    except OSError:
        return []


def children(pid: int) -> set[int]:
    """Returns the ids of a process's direct children, the dead ones not included."""
    found = set()
    for candidate in all_pids():
        fields = stat_fields(candidate)
        if len(fields) > 1 and fields[1] == str(pid) and fields[0] != "Z":
            found.add(candidate)
    return found


def tree(pid: int) -> set[int]:
    """Returns a process and all its descendants."""
    parents = {candidate: fields[1] for candidate in all_pids() if len(fields := stat_fields(candidate)) > 1}
    found, new = {pid}, {pid}
    while new:
        known = {str(member) for member in new}
        new = {candidate for candidate, parent in parents.items() if parent in known} - found
        found |= new
    return found


def users(path: str | os.PathLike[str]) -> set[int]:
    """Returns the processes that have a file open or in their memory."""
    wanted = os.fspath(path)
    found = set()
    for pid in all_pids():
        folder = _PROC / str(pid)
        with contextlib.suppress(OSError):
            if any(line.endswith(wanted) for line in (folder / "maps").read_text(errors="replace").splitlines()):
                found.add(pid)
                continue
        with contextlib.suppress(OSError):
            links = [link_target(entry) for entry in (folder / "fd").iterdir()]
            if wanted in links:
                found.add(pid)
    return found


def with_environment(name: str, value: str) -> set[int]:
    """Returns the processes that were started with `name=value` in their environment.

    A process group or a parent id loses a process that starts its own session or whose parent dies; the
    environment is inherited through both.
    """
    wanted = f"{name}={value}".encode()
    found = set()
    for pid in all_pids():
        if pid == os.getpid():
            continue
        try:
            entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in entries and lives(pid):
            found.add(pid)
    return found


def left_after(patience: float, look: Callable[[], Left]) -> Left:
    """Looks again and again until nothing is found any more; returns what was found last.

    Args:
        patience: Seconds after which to stop looking.
        look: Returns something false once nothing is left.
    """
    end = time.monotonic() + patience
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to processes, of which some may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_group(pgid: int) -> None:
    """Kills a process group that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def kill_with_environment(name: str, value: str, patience: float = 5.0) -> set[int]:
    """Kills every process started with `name=value` in its environment and waits until they are gone.

    Args:
        name: The variable.
        value: Its value, which must be unique to what is to be killed.
        patience: Seconds after which to stop waiting.

    Returns:
        The processes that were found alive.
    """
    killed: set[int] = set()
    end = time.monotonic() + patience
    while (alive := with_environment(name, value)) and time.monotonic() < end:
        send(alive, signal.SIGKILL)
        killed |= alive
        time.sleep(0.02)
    return killed
