"""What the system says of processes, those of others too."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any


def stat_fields(pid: Any) -> list[str]:
    """What ``/proc`` has of a process after its name; empty if there is no such process, or no ``/proc``."""
    with suppress(OSError, ValueError, TypeError):
        text = Path(f"/proc/{int(pid)}/stat").read_text(errors="replace")
        return text.rpartition(")")[2].split()  # the name may itself hold spaces and parentheses
    return []


def state(pid: Any) -> str:
    """The letter for what a process does (``T``: stopped by a signal, ``Z``: dead); empty if there is none such."""
    fields = stat_fields(pid)
    return fields[0] if fields else ""


def lives(pid: Any) -> bool:
    """Whether there is such a process, and it has not ended."""
    return state(pid) not in ("", "Z", "X")


def link_target(link: Path) -> str:
    """Where a link of ``/proc`` leads; nothing once what it stood for is gone."""
    with suppress(OSError):
        return os.readlink(link)
    return ""


def signal_name(number: int) -> str:
    """The name of a signal, or the number of one that has no name, as most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
