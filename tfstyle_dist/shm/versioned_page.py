"""A page of versions: one process writes values in shared memory, others read them without asking (a seqlock).

Each value has a word: its version, the buffer that holds it and two flags. A reader that copies a value reads the word
before and after. A reader that uses a buffer in place puts a mark into that buffer's row, in a column of its own, and
then looks whether the word is still the same; the writer looks at the marks after it has said that it will write. So
one of both sees the other (as with hazard pointers). The order of loads and stores that this needs is that of x86-64,
with a ``fence`` between a store and the load that follows it (``shm/ordering.py``).
"""

from __future__ import annotations

from typing import Any

MOST_VARIABLES = 16384
"""So many values at most."""
MOST_LEASED = 1024
"""So many of them have several buffers."""
BUFFERS = 16
"""Of each such value; memory is taken when a buffer is first used."""
COLUMNS = 64
"""So many readers can use buffers in place; others copy."""
WRITING, LEASABLE = 1, 2
TRIES = 4
ROW_BYTES = BUFFERS * COLUMNS
BYTES = 8 * MOST_VARIABLES + MOST_LEASED * ROW_BYTES


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

    def marks(self, index: int) -> memoryview:
        """The marks of one value that has several buffers: a row of ``COLUMNS`` bytes for each buffer."""
        return self._marks[index * ROW_BYTES : (index + 1) * ROW_BYTES]

    def clear(self, column: int, count: int) -> None:
        """Takes away the marks of a reader that is gone, on the first ``count`` values with several buffers."""
        end = count * ROW_BYTES
        self._marks[column:end:COLUMNS] = bytes(len(range(column, end, COLUMNS)))
