"""The memory that a variable's value lives in: a write leaves alone what a client uses, and goes into other memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from tfstyle_dist.shm import versioned_page
from tfstyle_dist.shm.ordering import fence
from tfstyle_dist.shm.versioned_page import BUFFERS, COLUMNS, LEASABLE, WRITING

SMALLEST = 1 << 18
"""Bytes; smaller variables are copied before they are sent."""
_SPARES = 2
FREE = bytes(COLUMNS)
"""The marks of a buffer that nobody uses."""


class OwnerSegment(Protocol):
    """The memory that a variable's value lives in."""

    def publish(self, version: int) -> None:
        """The value is whole, and is of this version."""

    def begin(self, stored: Any, keep: bool) -> torch.Tensor | None:
        """Before the value is written.

        Args:
            stored: the variable.
            keep: the write needs the old value where it writes; otherwise it makes every element anew.

        Returns:
            The old value, if the variable has moved to memory that does not hold it.
        """

    def lease(self, stored: Any) -> SegmentLease | None:
        """Keeps the memory of the present value as it is until ``release``; ``None``: that is not possible."""

    def release(self, lease: SegmentLease) -> None:
        """A lease is not used any more."""


class SegmentLease:
    """The present value of a variable, which stays as it is.

    Args:
        owner: of the memory.
        data: the value.
        buffer: the owner's own number of that memory.
    """

    __slots__ = ("_owner", "buffer", "data")

    def __init__(self, owner: OwnerSegment, data: torch.Tensor, buffer: int) -> None:
        self._owner, self.data, self.buffer = owner, data, buffer

    def release(self) -> None:
        """It is not used any more."""
        self._owner.release(self)


class PrivateSegment:
    """Of a variable that no other process reads: memory of this process."""

    def __init__(self) -> None:
        self._leased: dict[int, int] = {}
        self._current = 0
        self._spares: list[torch.Tensor] = []

    def publish(self, version: int) -> None:
        """Nobody looks."""

    def begin(self, stored: Any, keep: bool) -> torch.Tensor | None:
        """Before the value is written: if it is leased, other memory takes its place."""
        old: torch.Tensor = stored.parameter.data
        if old.data_ptr() not in self._leased:
            return None
        fresh = self._spares.pop() if self._spares else torch.empty_like(old)
        stored.parameter.data = fresh
        self._current = fresh.data_ptr()
        if not keep:
            return old
        fresh.copy_(old)
        return None

    def lease(self, stored: Any) -> SegmentLease | None:
        """Keeps the present value as it is."""
        data: torch.Tensor = stored.parameter.data
        self._current = data.data_ptr()
        self._leased[self._current] = self._leased.get(self._current, 0) + 1
        return SegmentLease(self, data, self._current)

    def release(self, lease: SegmentLease) -> None:
        """The last one gives the memory free for a later write, unless it holds the value still."""
        self._leased[lease.buffer] -= 1
        if self._leased[lease.buffer] == 0:
            del self._leased[lease.buffer]
            if lease.buffer != self._current and len(self._spares) < _SPARES:
                self._spares.append(lease.data)


class CopiedSegment:
    """Of a variable that clients copy: one place.

    Args:
        words: of the versioned page.
        index: of the variable's word.
    """

    def __init__(self, words: Any, index: int) -> None:
        self._words, self._index = words, index

    def publish(self, version: int) -> None:
        """The value is whole, and is of this version."""
        self._words[self._index] = versioned_page.pack(version, 0, 0)

    def begin(self, stored: Any, keep: bool) -> torch.Tensor | None:
        """Before the value is written: readers wait.

        Args:
            stored: the variable.
            keep: the write needs the old value where it writes; otherwise it makes every element anew.

        Returns:
            The old value, if the variable has moved to a buffer that does not hold it.
        """
        self._words[self._index] |= WRITING
        return None

    def lease(self, stored: Any) -> SegmentLease | None:
        """Not possible: the next write changes this place."""
        return None

    def release(self, lease: SegmentLease) -> None:
        """A lease is not used any more."""


class LeasedSegment(CopiedSegment):
    """Of a large variable, whose value clients use in place: several buffers.

    Args:
        words: of the versioned page.
        index: of the variable's word.
        marks: of its buffers.
        buffers: as many tensors; their memory is not touched yet, but for the first one's.
    """

    def __init__(self, words: Any, index: int, marks: memoryview, buffers: list[torch.Tensor]) -> None:
        super().__init__(words, index)
        self._rows = [marks[i * COLUMNS : (i + 1) * COLUMNS] for i in range(BUFFERS)]
        self._buffers = buffers
        self._order = [0]  # buffers that have been used, the latest last
        self._current, self._spare = 0, -1
        self._leasable = 0
        self._leased = [0] * BUFFERS

    def _in_use(self, buffer: int) -> bool:
        return self._leased[buffer] > 0 or self._rows[buffer].tobytes() != FREE

    def publish(self, version: int) -> None:
        """The value is whole; clients may use it in place if the next write will find another buffer."""
        self._spare = self._find_spare()
        self._leasable = LEASABLE if self._spare >= 0 else 0
        self._words[self._index] = versioned_page.pack(version, self._current, self._leasable)

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
                self._words[self._index] |= WRITING
                fence()
                if not self._in_use(self._current):
                    return None
                self._words[self._index] &= ~WRITING
            return self._move(stored, self._spare, keep)
        self._words[self._index] |= WRITING  # the published version cannot be in use: it was not leasable
        return None

    def lease(self, stored: Any) -> SegmentLease | None:
        """Keeps the present value as it is, if the next write will find another buffer."""
        if not self._leasable:
            return None
        self._leased[self._current] += 1
        return SegmentLease(self, stored.parameter.data, self._current)

    def release(self, lease: SegmentLease) -> None:
        """A lease is not used any more."""
        self._leased[lease.buffer] -= 1

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
