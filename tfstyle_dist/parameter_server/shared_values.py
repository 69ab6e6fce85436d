"""A server's variables in memory that the clients of its host read without asking.

Small variables and tables have one place: a client copies, and sees by the word on the board whether the copy is whole.
A large variable has several buffers: clients use the one that is published in place, and an update that finds it in
use is written into another one, which is published then. A buffer without marks is used again. The server never waits
for a client.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tfstyle_dist.parameter_server import board
from tfstyle_dist.parameter_server.board import BUFFERS, COLUMNS, LEASABLE, WRITING, Board

LEASED_BYTES = 1 << 18
"""Variables from this size on have several buffers; smaller ones are copied."""
_HUGE = 1 << 21
_MOST_FILES = 256
_MOST_GROUPS = 16
_LARGEST_MOVED = 1 << 30
"""Moving a variable needs its memory twice for a moment."""
_FREE = bytes(COLUMNS)


class Home:
    """Where a shared variable lives: one place.

    Args:
        words: of the board.
        slot: the variable's word.
    """

    def __init__(self, words: Any, slot: int) -> None:
        self._words, self._slot = words, slot

    def publish(self, version: int) -> None:
        """The value is whole, and is of this version."""
        self._words[self._slot] = board.pack(version, 0, 0)

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


class BufferedHome(Home):
    """Where a large variable lives: several buffers.

    Args:
        words: of the board.
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

    def _in_use(self, buffer: int) -> bool:
        return self._rows[buffer].tobytes() != _FREE

    def publish(self, version: int) -> None:
        """The value is whole; clients may use it in place if the next write will find another buffer."""
        self._spare = self._find_spare()
        self._leasable = LEASABLE if self._spare >= 0 else 0
        self._words[self._slot] = board.pack(version, self._current, self._leasable)

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
                board.barrier()
                if not self._in_use(self._current):
                    return None
                self._words[self._slot] &= ~WRITING
            return self._move(stored, self._spare, keep)
        self._words[self._slot] |= WRITING  # the published version cannot be in use: it was not leasable
        return None

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


class SharedVariables:
    """The server's end: moves variables into shared memory when the first client of this host asks."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._board: Board | None = None
        self._known: dict[int, list[int]] = {}  # variable: slot, place of its marks or -1, first file, offset, bytes
        self._leased = self._groups = 0
        self._columns: set[int] = set()

    def _file(self, nbytes: int) -> mmap.mmap:
        handle = os.memfd_create(board.NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, nbytes)
            memory = mmap.mmap(handle, nbytes)
        except BaseException:
            os.close(handle)
            raise
        self._files.append(handle)
        return memory

    def _words(self) -> Any:
        if self._board is None:
            self._board = Board(self._file(board.BYTES))
        return self._board.words

    def table(self, number: int, nbytes: int) -> tuple[torch.Tensor, Home] | None:
        """Memory of its own for a new, large variable: zeros that cost nothing until they are written.

        Args:
            number: of the variable.
            nbytes: its size.

        Returns:
            The bytes and their home; ``None`` where nothing can be shared.
        """
        room = len(self._known) < board.MOST_VARIABLES and len(self._files) < _MOST_FILES
        if not board.possible() or not room or nbytes == 0:
            return None
        try:
            words, memory = self._words(), self._file(nbytes)
        except OSError:
            return None
        self._known[number] = [len(self._known), -1, len(self._files) - 1, 0, nbytes]
        return torch.frombuffer(memory, dtype=torch.uint8), Home(words, self._known[number][0])

    def describe(self, variables: Mapping[int, Any], column: int = -1) -> dict[str, Any]:
        """Shares the variables that are not shared yet.

        Args:
            variables: ``StoredVariable`` by number.
            column: where the client may put marks; -1: it copies.

        Returns:
            What ``ValuesReader`` needs: process, files with their sizes, and of each variable its places.
        """
        new = [v for n, v in variables.items() if n not in self._known and v.home is None and _movable(v)]
        new = new[: max(board.MOST_VARIABLES - len(self._known), 0)]
        if new and self._groups < _MOST_GROUPS:
            with contextlib.suppress(OSError):  # not enough memory: pulls go by message
                self._share(new)
        sizes = [os.fstat(handle).st_size for handle in self._files]
        known = [[number, *place] for number, place in self._known.items() if number in variables]
        return {
            "process": os.getpid(), "files": list(self._files), "bytes": sizes, "variables": known, "column": column,
        }  # fmt: skip

    def _share(self, new: list[Any]) -> None:
        words = self._words()
        large = [v for v in new if v.parameter.nbytes >= LEASED_BYTES][: board.MOST_LEASED - self._leased]
        chosen = {v.number for v in large}
        small = [v for v in new if v.number not in chosen]
        if small:
            places, total = _places(small, 64)
            memory = self._file(max(total, mmap.PAGESIZE))
            os.posix_fallocate(self._files[-1], 0, total)
            data = torch.frombuffer(memory, dtype=torch.uint8)
            for variable, place in zip(small, places, strict=True):
                slot = self._note(variable, -1, len(self._files) - 1, place)
                _settle(variable, data, place, Home(words, slot))
        if large:
            self._groups += 1
            places, total = _places(large, mmap.PAGESIZE)
            first = len(self._files)
            memories = [self._file(total) for _ in range(BUFFERS)]
            for memory in memories:
                with contextlib.suppress(OSError):
                    memory.madvise(mmap.MADV_HUGEPAGE)
            all_bytes = [torch.frombuffer(memory, dtype=torch.uint8) for memory in memories]
            assert self._board is not None
            for variable, (offset, nbytes) in zip(large, places, strict=True):
                old = variable.parameter.data
                slot = self._note(variable, self._leased, first, (offset, nbytes))
                buffers = [data[offset : offset + nbytes].view(old.dtype).view(old.shape) for data in all_bytes]
                home = BufferedHome(words, slot, self._board.marks(self._leased), buffers)
                self._leased += 1
                _settle(variable, all_bytes[0], (offset, nbytes), home)

    def _note(self, variable: Any, marks: int, file: int, place: tuple[int, int]) -> int:
        slot = len(self._known)
        self._known[variable.number] = [slot, marks, file, *place]
        return slot

    # ---- clients ----------------------------------------------------------------------------------------------

    def join(self) -> int:
        """A column for a client that can use buffers in place; -1: there is none left."""
        column = next((c for c in range(COLUMNS) if c not in self._columns), -1)
        if column >= 0:
            self._columns.add(column)
        return column

    def leave(self, column: int) -> None:
        """A client is gone: what it used is free."""
        if column in self._columns:
            self._columns.remove(column)
            if self._board is not None:
                self._board.clear(column, self._leased)

    def leases(self) -> int:
        """How many buffers are in use by clients."""
        if self._board is None:
            return 0
        rows = (self._board.marks(place).tobytes() for place in range(self._leased))
        return sum(row[i : i + COLUMNS] != _FREE for row in rows for i in range(0, len(row), COLUMNS))

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Gives up the files; the memory goes with the last mapping."""
        for handle in self._files:
            os.close(handle)
        self._files.clear()
        self._known.clear()


def _movable(variable: Any) -> bool:
    return not variable.rows_only and variable.parameter.nbytes <= _LARGEST_MOVED


def _places(variables: list[Any], alignment: int) -> tuple[list[tuple[int, int]], int]:
    """Offsets and sizes of variables in one file, and the file's size."""
    places, total = [], 0
    for variable in variables:
        nbytes = variable.parameter.nbytes
        step = _HUGE if nbytes >= _HUGE else alignment
        total = -(-total // step) * step
        places.append((total, nbytes))
        total += -(-nbytes // alignment) * alignment
    return places, total


def _settle(variable: Any, data: torch.Tensor, place: tuple[int, int], home: Home) -> None:
    """Moves a variable to its home."""
    offset, nbytes = place
    old = variable.parameter.data
    if nbytes:
        shared = data[offset : offset + nbytes].view(old.dtype).view(old.shape)
        shared.copy_(old)
        variable.parameter.data = shared
    variable.home = home
    home.publish(variable.version)
