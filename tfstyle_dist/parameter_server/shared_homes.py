"""Where a variable lives that the clients of its host read: one place, or several buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tfstyle_dist.parameter_server.lending import Loan
from tfstyle_dist.shm import versioned_page
from tfstyle_dist.shm.ordering import fence
from tfstyle_dist.shm.versioned_page import BUFFERS, COLUMNS, LEASABLE, WRITING

FREE = bytes(COLUMNS)
"""The marks of a buffer that nobody uses."""


class OnePlace:
    """Where a shared variable lives: one place.

    Args:
        words: of the versioned_page.
        slot: the variable's word.
    """

    def __init__(self, words: Any, slot: int) -> None:
        self._words, self._slot = words, slot

    def publish(self, version: int) -> None:
        """The value is whole, and is of this version."""
        self._words[self._slot] = versioned_page.pack(version, 0, 0)

    def begin(self, stored: Any, keep: bool) -> torch.Tensor | None:
        """Before the value is written: readers wait.

        Args:
            stored: the variable.
            keep: the write needs the old value where it writes; otherwise it makes every element anew.

        Returns:
            The old value, if the variable has moved to a buffer that does not hold it.
        """
        self._words[self._slot] |= WRITING
        return None

    def lend(self, stored: Any) -> Loan | None:
        """Not possible: the next write changes this place."""
        return None

    def take_back(self, loan: Loan) -> None:
        """A loan is not used any more."""


class ManyPlaces(OnePlace):
    """Where a large variable lives: several buffers.

    Args:
        words: of the versioned_page.
        slot: the variable's word.
        marks: of its buffers.
        buffers: as many tensors; their memory is not touched yet, but for the first one's.
    """

    def __init__(self, words: Any, slot: int, marks: memoryview, buffers: list[torch.Tensor]) -> None:
        super().__init__(words, slot)
        self._rows = [marks[i * COLUMNS : (i + 1) * COLUMNS] for i in range(BUFFERS)]
        self._buffers = buffers
        self._order = [0]  # buffers that have been used, the latest last
        self._current, self._spare = 0, -1
        self._leasable = 0
        self._lent = [0] * BUFFERS

    def _in_use(self, buffer: int) -> bool:
        return self._lent[buffer] > 0 or self._rows[buffer].tobytes() != FREE

    def publish(self, version: int) -> None:
        """The value is whole; clients may use it in place if the next write will find another buffer."""
        self._spare = self._find_spare()
        self._leasable = LEASABLE if self._spare >= 0 else 0
        self._words[self._slot] = versioned_page.pack(version, self._current, self._leasable)

    def _find_spare(self) -> int:
        for buffer in reversed(self._order):
            if buffer != self._current and not self._in_use(buffer):
                return buffer
        if len(self._order) < BUFFERS and _memory_for(4 * self._buffers[0].nbytes):
            self._order.insert(0, len(self._order))
            return self._order[0]
        return -1

    def begin(self, stored: Any, keep: bool) -> torch.Tensor | None:
        """Before the value is written: in place if nobody uses it, otherwise into the spare buffer."""
        if self._spare >= 0:
            if not self._in_use(self._current):
                self._words[self._slot] |= WRITING
                fence()
                if not self._in_use(self._current):
                    return None
                self._words[self._slot] &= ~WRITING
            return self._move(stored, self._spare, keep)
        self._words[self._slot] |= WRITING  # the published version cannot be in use: it was not leasable
        return None

    def lend(self, stored: Any) -> Loan | None:
        """Keeps the present value as it is, if the next write will find another buffer."""
        if not self._leasable:
            return None
        self._lent[self._current] += 1
        return Loan(self, stored.parameter.data, self._current)

    def take_back(self, loan: Loan) -> None:
        """A loan is not used any more."""
        self._lent[loan.buffer] -= 1

    def _move(self, stored: Any, buffer: int, keep: bool) -> torch.Tensor | None:
        old: torch.Tensor = stored.parameter.data
        self._current, self._spare = buffer, -1
        self._order.remove(buffer)
        self._order.append(buffer)
        stored.parameter.data = self._buffers[buffer]
        if not keep:
            return old
        stored.parameter.data.copy_(old)
        return None


def _memory_for(nbytes: int) -> bool:
    """Whether the machine has so much memory left."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10 > nbytes
    except OSError:
        pass
    return False
