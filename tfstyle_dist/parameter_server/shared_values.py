"""Variables in memory that a server shares with the clients of its host, so that a pull is one copy and no message.

Each variable has a word beside it: twice its version, plus one while it is being written. A client reads the word,
copies, and reads the word again: if it is the same and even, the copy is of that version. The server never waits for a
client, so a client that dies while it reads does no harm. The order of reads and writes that this needs is that of
x86-64; elsewhere pulls go by message.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
from collections.abc import Mapping
from typing import Any

import torch

_NAME = "tfstyle-ps-values"
_PAGE = mmap.PAGESIZE
_MOST = 16384
"""So many variables are shared at most; their list must fit a message."""
_MOST_TABLES = 256
_LARGEST_MOVED = 1 << 30
"""Moving a variable needs its memory twice for a moment."""
_TRIES = 4


def possible() -> bool:
    """Whether this machine can share variables in this way."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


class SharedVariables:
    """The server's end: moves variables into shared memory when the first client of this host asks."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self._known: dict[int, list[int]] = {}

    def table(self, number: int, nbytes: int) -> tuple[torch.Tensor, Any] | None:
        """Memory of its own for a new, large variable: zeros that cost nothing until they are written.

        Args:
            number: of the variable.
            nbytes: its size.

        Returns:
            The bytes and the word; ``None`` where nothing can be shared.
        """
        if not possible() or len(self._files) >= _MOST_TABLES or nbytes == 0:
            return None
        try:
            handle = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        except OSError:
            return None
        try:
            os.ftruncate(handle, _PAGE + nbytes)
            memory = mmap.mmap(handle, _PAGE + nbytes)
        except OSError:
            os.close(handle)
            return None
        self._files.append(handle)
        self._known[number] = [len(self._files) - 1, 0, _PAGE, nbytes]
        word = memoryview(memory).cast("B")[:8].cast("Q")
        return torch.frombuffer(memory, dtype=torch.uint8)[_PAGE : _PAGE + nbytes], word

    def describe(self, variables: Mapping[int, Any]) -> dict[str, Any]:
        """Shares the variables that are not shared yet.

        Args:
            variables: ``StoredVariable`` by number.

        Returns:
            What ``ValuesReader`` needs: process, files with their sizes, and of each variable file, place of the word,
            offset and number of bytes.
        """
        new = [v for n, v in variables.items() if n not in self._known and v.word is None and _movable(v)]
        new = new[: max(_MOST - len(self._known), 0)]
        if new:
            with contextlib.suppress(OSError):  # not enough memory: pulls go by message
                self._share(new)
        sizes = [os.fstat(handle).st_size for handle in self._files]
        known = [[number, *place] for number, place in self._known.items() if number in variables]
        return {"process": os.getpid(), "files": list(self._files), "bytes": sizes, "variables": known}

    def _share(self, new: list[Any]) -> None:
        start = -(-8 * len(new) // _PAGE) * _PAGE
        places, total = [], start
        for variable in new:
            nbytes = variable.parameter.numel() * variable.parameter.element_size()
            places.append((total, nbytes))
            total += -(-nbytes // 64) * 64
        handle = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(handle, 0, total)
            memory = mmap.mmap(handle, total)
        except BaseException:
            os.close(handle)
            raise
        data = torch.frombuffer(memory, dtype=torch.uint8)
        words = memoryview(memory).cast("B")[:start].cast("Q")
        self._files.append(handle)
        for slot, (variable, (offset, nbytes)) in enumerate(zip(new, places, strict=True)):
            old = variable.parameter.data
            if nbytes:
                shared = data[offset : offset + nbytes].view(old.dtype).view(old.shape)
                shared.copy_(old)
                variable.parameter.data = shared
            variable.word = words[slot : slot + 1]
            variable.version = variable.version  # writes the word
            self._known[variable.number] = [len(self._files) - 1, slot, offset, nbytes]

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Gives up the files; the memory goes with the last mapping."""
        for handle in self._files:
            os.close(handle)
        self._files.clear()


def _movable(variable: Any) -> bool:
    nbytes: int = variable.parameter.numel() * variable.parameter.element_size()
    return not variable.rows_only and nbytes <= _LARGEST_MOVED


class ValuesReader:
    """The client's end.

    Args:
        description: what ``SharedVariables.describe`` gave.

    Raises:
        OSError: another user's or another container's process.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        self._places: dict[int, tuple[torch.Tensor, Any]] = {}
        self.private: set[int] = set()
        files = []
        for number, nbytes in zip(description["files"], description["bytes"], strict=True):
            handle = os.open(f"/proc/{int(description['process'])}/fd/{int(number)}", os.O_RDWR)
            try:
                if not os.readlink(f"/proc/self/fd/{handle}").startswith(f"/memfd:{_NAME}"):
                    raise PermissionError("the server's list of variables names another file")
                memory = mmap.mmap(handle, int(nbytes))
            finally:
                os.close(handle)
            files.append((torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory).cast("B")))
        for variable, file, slot, offset, nbytes in description["variables"]:
            data, raw = files[file]
            self._places[variable] = (data[offset : offset + nbytes], raw[8 * slot : 8 * slot + 8].cast("Q"))

    def __contains__(self, variable: int) -> bool:
        return variable in self._places

    def version(self, variable: int) -> int:
        """Its version now; an odd number of half versions, rounded down, while it is written."""
        return int(self._places[variable][1][0]) >> 1

    def copy(self, variable: int, target: torch.Tensor) -> int | None:
        """Copies a variable's bytes.

        Args:
            variable: its number.
            target: as many bytes.

        Returns:
            The version of the copy; ``None`` if the variable was being written all the time.
        """
        data, word = self._places[variable]
        for _ in range(_TRIES):
            before = int(word[0])
            if before & 1:
                os.sched_yield()
                continue
            target.copy_(data)
            if int(word[0]) == before:
                return before >> 1
        return None

    def rows(self, variable: int, numbers: torch.Tensor, target: torch.Tensor) -> bool:
        """Copies some rows of a variable.

        Args:
            variable: its number.
            numbers: int64 row numbers.
            target: one row for each number, with the variable's dtype.

        Returns:
            Whether that was possible: not if the variable was being written all the time, or a number is out of range.
        """
        data, word = self._places[variable]
        table = data.view(target.dtype).view(-1, *target.shape[1:])
        if len(numbers) == 0 or int(numbers.min()) < 0 or int(numbers.max()) >= len(table):
            return False
        for _ in range(_TRIES):
            before = int(word[0])
            if before & 1:
                os.sched_yield()
                continue
            torch.index_select(table, 0, numbers, out=target)
            if int(word[0]) == before:
                return True
        return False
