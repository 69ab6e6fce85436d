"""The page that a server shares with the clients of its host: versions of its variables, and marks on what is in use.

Each variable has a word: its version, the buffer that holds it and two flags. A client that copies a variable reads the
word before and after. A client that uses a buffer in place puts a mark into that buffer's row, in a column of its own,
and then looks whether the word is still the same; a server looks at the marks after it has said that it will write. So
one of both sees the other (as with hazard pointers). The order of reads and writes that this needs is that of x86-64
with a full barrier between a store and the load that follows it; elsewhere pulls go by message.
"""

from __future__ import annotations

import os
import platform
import threading
from typing import Any

MOST_VARIABLES = 16384
"""So many variables are shared at most; their list must fit a message."""
MOST_LEASED = 1024
"""So many of them have several buffers."""
BUFFERS = 16
"""Of each such variable; memory is taken when a buffer is first used."""
COLUMNS = 64
"""So many clients can use buffers in place; others copy."""
WRITING, LEASABLE = 1, 2
TRIES = 4
ROW_BYTES = BUFFERS * COLUMNS
BYTES = 8 * MOST_VARIABLES + MOST_LEASED * ROW_BYTES

_lock = threading.Lock()


def file_name(owner: str, place: int) -> str:
    """The name of a memory file of a server: clients open no others.

    Args:
        owner: drawn by the server.
        place: the file's among those of the server.
    """
    return f"tfstyle-ps-values-{owner}-{place}"


def is_possible() -> bool:
    """Whether this machine can share variables in this way."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


def barrier() -> None:
    """What was stored before is seen by others before anything is loaded after: a lock is taken by an atomic swap."""
    with _lock:
        pass


def pack(version: int, buffer: int, flags: int) -> int:
    """A word."""
    return version << 16 | buffer << 8 | flags


def version_of(word: int) -> int:
    """The version in a word."""
    return word >> 16


def buffer_of(word: int) -> int:
    """The buffer in a word."""
    return word >> 8 & 0xFF


class VersionedPage:
    """One end's view of the page.

    Args:
        memory: the mapping of ``BYTES`` bytes.
    """

    def __init__(self, memory: Any) -> None:
        raw = memoryview(memory).cast("B")
        self.words = raw[: 8 * MOST_VARIABLES].cast("Q")
        self._marks = raw[8 * MOST_VARIABLES :]

    def marks(self, place: int) -> memoryview:
        """The marks of one variable: a row of ``COLUMNS`` bytes for each buffer."""
        return self._marks[place * ROW_BYTES : (place + 1) * ROW_BYTES]

    def clear(self, column: int, places: int) -> None:
        """Takes away the marks of a client that is gone, on the first ``places`` variables with several buffers."""
        end = places * ROW_BYTES
        self._marks[column:end:COLUMNS] = bytes(len(range(column, end, COLUMNS)))
