"""Threads that help with one large sum: they take units of work from a counter that all share.

Neither of numba's thread pools would do. Its own ("workqueue") ends the process when two Python threads call it at
once, as replica threads do, and that of OpenMP ends a process that forks, as data loaders do. Here the compiled code is
serial, releases the interpreter's lock and runs in ordinary Python threads. The caller takes units like the helpers
and never waits for a helper that has not begun, so a busy machine, a helper lost in a fork or one that serves another
caller only mean less help.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Final

# A helper that has begun runs native code over at most one unit more; this is a limit for a stopped process.
_LIMIT_SECONDS: Final = 300.0

_lock = threading.Lock()
_inboxes: list[queue.SimpleQueue[Callable[[], None]]] = []


def share(work: Callable[[], bool], num_threads: int) -> None:
    """Runs ``work`` in this thread and, at the same time, in up to ``num_threads - 1`` helpers.

    Args:
        work: Takes units until none is left; returns whether it finished the last of all. It must release the
            interpreter's lock and must not raise.
        num_threads: How many threads may work, this one included.

    Raises:
        RuntimeError: A helper did not finish the unit it took.
    """
    finished = threading.Lock()
    finished.acquire()

    def help_out() -> None:
        if work():
            finished.release()

    for inbox in _helpers(num_threads - 1):
        inbox.put(help_out)
    if not work() and not finished.acquire(timeout=_LIMIT_SECONDS):
        raise RuntimeError(f"a helper thread of a sum did not finish its part within {_LIMIT_SECONDS:.0f} seconds")


def _helpers(count: int) -> list[queue.SimpleQueue[Callable[[], None]]]:
    """The inboxes of ``count`` helpers; threads are started when first needed and live as long as the process."""
    if len(_inboxes) < count:
        with _lock:
            while len(_inboxes) < count:
                inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
                name = f"tfstyle-sum-{len(_inboxes) + 1}"
                threading.Thread(target=_serve, args=(inbox,), name=name, daemon=True).start()
                _inboxes.append(inbox)
    return _inboxes[:count]


def _serve(inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        job = inbox.get()
        job()
        del job


def _forget_helpers() -> None:
    """A forked child has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _inboxes.clear()


os.register_at_fork(after_in_child=_forget_helpers)
