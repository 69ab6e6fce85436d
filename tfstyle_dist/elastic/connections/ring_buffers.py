"""Bytes between two workers of one host through shared memory: a ring buffer for each direction.

Who writes puts bytes behind the last ones and then says how many there are in all; who reads says how many it has
taken. What a worker was writing when it was killed was not said, so nobody takes it for whole.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress

from tfstyle_dist.elastic.connections.doorbell import Announced
from tfstyle_dist.shm import memory_file, ordering

RING_BYTES = 1 << 20
_WRITTEN, _TAKEN, _WANTS_ROOM = 0, 8, 16  # words of 8 bytes, each in a cache line of its own
_HEAD = 4096
_WHOLE = 2 * (_HEAD + RING_BYTES)


class RingBuffer:
    """One direction.

    Args:
        memory: its part of the mapping.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:_HEAD].cast("Q")
        self._bytes = memory[_HEAD:]
        self._size = len(self._bytes)

    def write(self, views: Sequence[memoryview]) -> list[memoryview]:
        """Writes what there is room for; returns the rest."""
        rest = list(views)
        written = self._words[_WRITTEN]
        while rest:
            room = self._size - (written - self._words[_TAKEN])
            place = written % self._size
            count = min(rest[0].nbytes, room, self._size - place)
            if not count:
                if not self._words[_WANTS_ROOM]:
                    self._words[_WANTS_ROOM] = 1
                    ordering.fence()
                    continue  # room may have been made before it was asked for
                break
            self._bytes[place : place + count] = rest[0][:count]
            written += count
            rest[0] = rest[0][count:]
            if not rest[0].nbytes:
                rest.pop(0)
        self._words[_WRITTEN] = written
        return rest

    def read_into(self, room: memoryview) -> int:
        """Takes as much as there is, in one piece, and fits; returns how many bytes."""
        taken = self._words[_TAKEN]
        place = taken % self._size
        count = min(self._words[_WRITTEN] - taken, len(room), self._size - place)
        if count:
            room[:count] = self._bytes[place : place + count]
            self._words[_TAKEN] = taken + count
        return count

    def was_asked_for_room(self) -> bool:
        """Whether who writes waits for room; asked by who has just taken something."""
        ordering.fence()
        wants = bool(self._words[_WANTS_ROOM])
        if wants:
            self._words[_WANTS_ROOM] = 0
        return wants


class RingPair:
    """Both directions, as one of the two workers sees them; the one that dials makes them.

    Args:
        handle: the open file.
        dialled: whether this worker did.
        announced: how the other worker finds the memory, until ``settle``.

    Attributes:
        there: from this worker to the other one.
        back: the other direction.
    """

    def __init__(self, handle: int, dialled: bool, announced: Announced | None = None) -> None:
        view = memoryview(mmap.mmap(handle, _WHOLE))
        first, second = RingBuffer(view[: _WHOLE // 2]), RingBuffer(view[_WHOLE // 2 :])
        self.there, self.back = (first, second) if dialled else (second, first)
        self.announced = announced
        self._handle: int | None = handle

    @classmethod
    def make(cls) -> RingPair | None:
        """New ones; their memory is reserved by the other worker, if it is on this host; ``None`` if there is none."""
        name = f"tfstyle-lines-{secrets.token_hex(8)}"
        with suppress(OSError, ValueError):
            handle = memory_file.create(name, _WHOLE)
            return cls(handle, True, [os.getpid(), handle, name])
        return None

    @classmethod
    def find(cls, announced: Announced) -> RingPair | None:
        """Those that the other worker has made; ``None`` if they cannot be had."""
        with suppress(OSError, ValueError):
            process, file, name = announced
            handle = memory_file.find(process, file, str(name), _WHOLE)
            found = None
            try:
                os.posix_fallocate(handle, 0, _WHOLE)
                found = cls(handle, False)
            finally:
                if found is None:
                    os.close(handle)
            found.settle()
            return found
        return None

    def settle(self) -> None:
        """The other worker has them: nobody else is to find them."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = self.announced = None
