"""Which core a replica's thread wakes up on: the one of the replica that passed the turn on.

Replicas that take turns work on the same Python objects. If each woke up on a core of its own, every object that a turn
touches would travel from cache to cache, which makes small steps twice as slow (``docs/log.md``).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable


class Core:
    """Moves one thread; used for the moment of waking up only, so that what the thread starts may run anywhere."""

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        self._allowed = os.sched_getaffinity(0) if _current is not None else set()
        self._moved = False

    def fetch(self) -> None:
        """Called by another thread: when this one wakes up, it does so on the caller's core."""
        if _current is None or len(self._allowed) < 2:
            return
        core = _current()
        if core in self._allowed:
            try:
                os.sched_setaffinity(self._thread, {core})
                self._moved = True
            except OSError:  # not allowed here, or the thread is gone
                self._allowed = set()

    def release(self) -> None:
        """Called by the thread itself when it has woken up: it may run anywhere again."""
        if self._moved:
            self._moved = False
            os.sched_setaffinity(0, self._allowed)


def _find() -> Callable[[], int] | None:
    try:
        found = ctypes.CDLL(None).sched_getcpu
    except (OSError, AttributeError):
        return None
    return found if hasattr(os, "sched_setaffinity") else None


_current = _find()
