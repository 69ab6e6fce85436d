"""A server's variables in memory that the clients of its host read without asking.

Small variables and tables have one place: a client copies, and sees by the word on the versioned page whether the copy
is whole. A large variable has several buffers: clients use the one that is published in place, and an update that finds
it in use is written into another one, which is published then. A buffer without marks is used again. The server never
waits for a client.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from collections.abc import Mapping
from typing import Any

import torch

from tfstyle_dist.parameter_server.server.owner_segments import FREE, CopiedSegment, LeasedSegment
from tfstyle_dist.parameter_server.transports.value_reader import file_name
from tfstyle_dist.shm import memory_file, ordering, versioned_page
from tfstyle_dist.shm.versioned_page import BUFFERS, COLUMNS, VersionedPage

LEASED_BYTES = 1 << 18
"""Variables from this size on have several buffers; smaller ones are copied."""
_HUGE = 1 << 21
_MOST_FILES = 256
_SMALL_FILE = 1 << 20
"""Bytes that small variables share, made one after the other; no memory is taken before a variable is there."""
_APART = 64
_MOST_GROUPS = 16
_LARGEST_MOVED = 1 << 30
"""Moving a variable needs its memory twice for a moment."""


class SharedVariables:
    """The server's end: moves variables into shared memory when the first client of this host asks."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._owner = uuid.uuid4().hex
        self._page: VersionedPage | None = None
        self._known: dict[int, list[int]] = {}  # variable: index, number of its marks or -1, first file, offset, bytes
        self._leased = self._groups = 0
        self._small, self._used = (0, torch.empty(0)), 0  # the number and memory of a file with room, and what is taken
        self._columns: set[int] = set()

    def _file(self, nbytes: int) -> mmap.mmap:
        handle = memory_file.create(file_name(self._owner, len(self._files)), nbytes)
        try:
            memory = mmap.mmap(handle, nbytes)
        except BaseException:
            os.close(handle)
            raise
        self._files.append(handle)
        return memory

    def _words(self) -> Any:
        if self._page is None:
            self._page = VersionedPage(self._file(versioned_page.BYTES))
        return self._page.words

    def table(self, number: int, nbytes: int) -> tuple[torch.Tensor, CopiedSegment] | None:
        """Memory of its own for a new, large variable: zeros that cost nothing until they are written.

        Args:
            number: of the variable.
            nbytes: its size.

        Returns:
            The bytes and their owner; ``None`` where nothing can be shared.
        """
        room = len(self._known) < versioned_page.MOST_VARIABLES and len(self._files) < _MOST_FILES
        if not ordering.possible() or not room or nbytes == 0:
            return None
        try:
            words, memory = self._words(), self._file(nbytes)
        except OSError:
            return None
        self._known[number] = [len(self._known), -1, len(self._files) - 1, 0, nbytes]
        return torch.frombuffer(memory, dtype=torch.uint8), CopiedSegment(words, self._known[number][0])

    def describe(self, variables: Mapping[int, Any], column: int = -1) -> dict[str, Any]:
        """Shares the variables that are not shared yet.

        Args:
            variables: ``StoredVariable`` by number.
            column: where the client may put marks; -1: it copies.

        Returns:
            What ``ValueReader`` needs: process, the part of its files' names that was drawn, files with their sizes,
            and of each variable its location.
        """
        new = [v for n, v in variables.items() if n not in self._known and not v.is_shared and _movable(v)]
        new = new[: max(versioned_page.MOST_VARIABLES - len(self._known), 0)]
        if new and self._groups < _MOST_GROUPS:
            with contextlib.suppress(OSError):  # not enough memory: pulls go by message
                self._share(new)
        sizes = [os.fstat(handle).st_size for handle in self._files]
        known = [[number, *location] for number, location in self._known.items() if number in variables]
        return {
            "process": os.getpid(), "owner": self._owner, "files": list(self._files), "bytes": sizes,
            "variables": known, "column": column,
        }  # fmt: skip

    def _share(self, new: list[Any]) -> None:
        words = self._words()
        large = [v for v in new if v.parameter.nbytes >= LEASED_BYTES][: versioned_page.MOST_LEASED - self._leased]
        chosen = {v.number for v in large}
        small = [v for v in new if v.number not in chosen]
        if small:
            locations, total = _locations(small, _APART)
            start = self._room_for(total)
            file, data = self._small
            for variable, (offset, nbytes) in zip(small, locations, strict=True):
                location = start + offset, nbytes
                index = self._note(variable, -1, file, location)
                _settle(variable, data, location, CopiedSegment(words, index))
        if large:
            self._groups += 1
            locations, total = _locations(large, mmap.PAGESIZE)
            first = len(self._files)
            memories = [self._file(total) for _ in range(BUFFERS)]
            for memory in memories:
                with contextlib.suppress(OSError):
                    memory.madvise(mmap.MADV_HUGEPAGE)
            all_bytes = [torch.frombuffer(memory, dtype=torch.uint8) for memory in memories]
            assert self._page is not None
            for variable, (offset, nbytes) in zip(large, locations, strict=True):
                old = variable.parameter.data
                index = self._note(variable, self._leased, first, (offset, nbytes))
                buffers = [data[offset : offset + nbytes].view(old.dtype).view(old.shape) for data in all_bytes]
                owner = LeasedSegment(words, index, self._page.marks(self._leased), buffers)
                self._leased += 1
                _settle(variable, all_bytes[0], (offset, nbytes), owner)

    def _room_for(self, total: int) -> int:
        """Where small variables begin in their file. One that is made alone gets no file: each takes descriptors."""
        if self._used + total > len(self._small[1]):
            memory = self._file(max(total, _SMALL_FILE))
            self._small, self._used = (len(self._files) - 1, torch.frombuffer(memory, dtype=torch.uint8)), 0
        start = self._used
        os.posix_fallocate(self._files[self._small[0]], start, total)
        self._used += -(-total // _APART) * _APART
        return start

    def _note(self, variable: Any, marks: int, file: int, location: tuple[int, int]) -> int:
        index = len(self._known)
        self._known[variable.number] = [index, marks, file, *location]
        return index

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
            if self._page is not None:
                self._page.clear(column, self._leased)

    def leases(self) -> int:
        """How many buffers are in use by clients."""
        if self._page is None:
            return 0
        rows = (self._page.marks(index).tobytes() for index in range(self._leased))
        return sum(row[i : i + COLUMNS] != FREE for row in rows for i in range(0, len(row), COLUMNS))

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Gives up the files; the memory goes with the last mapping."""
        for handle in self._files:
            os.close(handle)
        self._files.clear()
        self._known.clear()
        self._small, self._used = (0, torch.empty(0)), 0


def _movable(variable: Any) -> bool:
    return not variable.rows_only and variable.parameter.nbytes <= _LARGEST_MOVED


def _locations(variables: list[Any], alignment: int) -> tuple[list[tuple[int, int]], int]:
    """Offsets and sizes of variables in one file, and the file's size."""
    locations, total = [], 0
    for variable in variables:
        nbytes = variable.parameter.nbytes
        step = _HUGE if nbytes >= _HUGE else alignment
        total = -(-total // step) * step
        locations.append((total, nbytes))
        total += -(-nbytes // alignment) * alignment
    return locations, total


def _settle(variable: Any, data: torch.Tensor, location: tuple[int, int], owner: CopiedSegment) -> None:
    """Moves a variable to its shared memory."""
    offset, nbytes = location
    old = variable.parameter.data
    if nbytes:
        shared = data[offset : offset + nbytes].view(old.dtype).view(old.shape)
        shared.copy_(old)
        variable.parameter.data = shared
    variable.segment = owner
    owner.publish(variable.version)
