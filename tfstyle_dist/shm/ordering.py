"""The order in which processes see each other's stores, on which flags in shared memory rest."""

from __future__ import annotations

import os
import platform
import sys
import threading

_lock = threading.Lock()


def possible() -> bool:
    """Whether this machine has shared memory in which a plain store announces the stores before it: Linux on x86-64.

    Other processors may reorder stores, and Python has no operation that would forbid it.
    """
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def fence() -> None:
    """What was stored before is seen by others before anything is loaded after.

    Of two processes that each write a word, call this and read the other's word, at least one sees what the other
    wrote. Taking a lock is the one atomic operation that Python has.
    """
    with _lock:
        pass
