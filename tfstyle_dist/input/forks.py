"""What is garbage when a process is forked stays untouched in it."""

from __future__ import annotations

import gc
import os
import threading
from functools import cache


@cache
def leave_garbage_to_the_parent() -> None:
    """From now on forked processes, as those of a ``DataLoader``, do not collect what was garbage before.

    Events, streams and memory of a GPU can be freed by no other process than the one that made them: a fork that does
    so is aborted. No collection begins between the fork and the moment when all that is there has been put aside.
    """
    forks = _Forks()
    os.register_at_fork(before=forks.before, after_in_parent=forks.in_parent, after_in_child=forks.in_child)


class _Forks:
    """Counts those under way: several threads may fork at once."""

    def __init__(self) -> None:
        self._lock, self._count, self._collects = threading.Lock(), 0, True

    def before(self) -> None:
        with self._lock:
            if self._count == 0:
                self._collects = gc.isenabled()
            self._count += 1
            gc.disable()

    def in_parent(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._collects:
                gc.enable()

    def in_child(self) -> None:
        self._lock, self._count = threading.Lock(), 0  # another thread may have had the lock
        gc.freeze()
        if self._collects:
            gc.enable()
