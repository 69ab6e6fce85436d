"""A process that is forked just after a collective call, as one of a ``DataLoader`` is, hardly ever stays in the fork.

A thread of Gloo's lets go of a tensor after the call has ended, and for that it becomes known to Python: for a moment
it has the lock on the list of threads, without the interpreter's. In Python 3.11 (seen with 3.11.7) a process that is
forked in that moment waits for the lock for ever (https://github.com/python/cpython/issues/112275).
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

_TIMES, _NO_THREAD = 200, ctypes.c_ulong(0)


@cache
def let_threads_become_known() -> None:
    """From now on a fork waits a moment until no thread has that lock.

    It is taken by asking for a thread that does not exist, again for those that were about to take it: whoever has had
    it waits for the interpreter's then, which the thread that forks has.
    """
    if sys.version_info < (3, 12) and sys.implementation.name == "cpython":
        os.register_at_fork(before=_wait)


def _wait() -> None:
    for _ in range(_TIMES):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(_NO_THREAD, None)
