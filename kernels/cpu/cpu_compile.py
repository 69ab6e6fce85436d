"""Whether sums can be compiled for the CPU here, and one thread at a time that does it."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_lock = threading.RLock()
_was_forked_while_compiling = False


def unavailable() -> str | None:
    """Why nothing can be compiled here, or ``None`` if it can. It does not import llvmlite."""
    if _was_forked_while_compiling:
        return "this process was forked while its parent was compiling a sum"
    return _missing()


@cache
def _missing() -> str | None:
    for package in ("llvmlite", "numpy"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install {package} (the extra 'cpu' of tfstyle_dist)"
    return None


@contextmanager
def compiling() -> Iterator[None]:
    """Lets one thread compile at a time; a process that is forked meanwhile knows that it cannot.

    Raises:
        RuntimeError: nothing can be compiled here.
    """
    if (reason := unavailable()) is not None:
        raise RuntimeError(f"no sum can be compiled for the CPU: {reason}")
    with _lock:
        yield


def _before_fork() -> None:
    _fork.found_lock = _lock.acquire(blocking=False)


def _after_fork_in_parent() -> None:
    if _fork.found_lock:
        _lock.release()


def _after_fork_in_child() -> None:
    global _lock, _was_forked_while_compiling
    if not _fork.found_lock:  # the compiler's locks may be held by a thread that does not exist here
        _was_forked_while_compiling = True
    _lock = threading.RLock()


_fork = threading.local()  # several threads may fork at once
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
