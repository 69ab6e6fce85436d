"""The client's end of the variables that a server of this host shares: copies, rows, and values used in layout."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tfstyle_dist.shm import memory_file, pages, versioned_page
from tfstyle_dist.shm.ordering import fence
from tfstyle_dist.shm.versioned_page import COLUMNS, LEASABLE, TRIES, WRITING, VersionedPage

_T = TypeVar("_T")


def file_name(owner: str, index: int) -> str:
    """The name of a memory file of a server: clients open no others.

    Args:
        owner: drawn by the server.
        index: the file's among those of the server.
    """
    return f"tfstyle-ps-values-{owner}-{index}"


class _Layout:
    """What is known of one variable, and the buffers of it that this process has mapped."""

    __slots__ = ("buffers", "first", "marks", "nbytes", "offset", "word_index")

    def __init__(self, word_index: int, marks: memoryview | None, first: int, offset: int, nbytes: int) -> None:
        self.word_index, self.marks, self.first, self.offset, self.nbytes = word_index, marks, first, offset, nbytes
        self.buffers: dict[int, _Buffer] = {}


class _Buffer:
    """One buffer of a variable in this process' memory.

    Args:
        memory: its bytes.
        private: what is written here stays here, and must be dropped before the buffer is used again.
    """

    __slots__ = ("address", "data", "is_leased", "memory", "shaped", "uses")

    def __init__(self, memory: memoryview, private: bool) -> None:
        self.memory = memory
        self.data = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
        self.shaped: torch.Tensor | None = None  # the same elements as the variable has them
        self.address = self.data.data_ptr()
        self.is_leased = False  # since its pages were last known to be the server's
        self.uses = 0
        if private:
            pages.populate(self.address, len(memory))

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The buffer as the variable's tensor."""
        found = self.shaped
        if found is None or found.shape != shape or found.dtype is not dtype:
            found = self.shaped = self.data.view(dtype).view(shape)
        return found


class ValueReader:
    """Reads what ``SharedVariables`` shares.

    Args:
        description: what ``SharedVariables.describe`` gave.

    Raises:
        OSError: another user's or another container's process.
    """

    def __init__(self, description: dict[str, Any]) -> None:
        self._layouts: dict[int, _Layout] = {}
        self.private: set[int] = set()
        self._files: list[int] = []
        self._sizes: list[int] = []
        self._mapped: dict[tuple[int, bool], memoryview] = {}
        self._leases: list[tuple[weakref.ref[Any], _Buffer, memoryview, int]] = []
        self.update(description)
        _readers.add(self)

    def update(self, description: dict[str, Any]) -> None:
        """Learns of new variables of the same server.

        Args:
            description: the newest.

        Raises:
            OSError: as the constructor.
        """
        self._process, self._column = int(description["process"]), int(description.get("column", -1))
        self._owner = str(description["owner"])
        self._files, self._sizes = list(description["files"]), list(description["bytes"])
        for file in range(len(self._files)):
            os.close(self._open(file))
        if not self._files:
            return
        page = VersionedPage(self._map(0, private=False))
        self._words = page.words
        for variable, word_index, marks, first, offset, nbytes in description["variables"]:
            if variable not in self._layouts:
                rows = page.marks(marks) if marks >= 0 else None
                self._layouts[variable] = _Layout(word_index, rows, first, offset, nbytes)

    def _open(self, file: int) -> int:
        name = file_name(self._owner, file)
        return memory_file.find(self._process, self._files[file], name, self._sizes[file])

    def _map(self, file: int, private: bool) -> memoryview:
        found = self._mapped.get((file, private))
        if found is None:
            handle = self._open(file)
            try:
                kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
                found = memoryview(mmap.mmap(handle, self._sizes[file], kind)).cast("B")
            finally:
                os.close(handle)
            self._mapped[file, private] = found
        return found

    def _buffer(self, layout: _Layout, number: int) -> _Buffer | None:
        """One that a value is in; ``None`` if it cannot be mapped any more: the server has just ended, for example."""
        found = layout.buffers.get(number)
        if found is None:
            private = layout.marks is not None
            try:
                memory = self._map(layout.first + number, private)[layout.offset : layout.offset + layout.nbytes]
            except OSError:
                return None
            found = layout.buffers[number] = _Buffer(memory, private)
        if found.is_leased and not found.uses:
            # A tensor was here; what was written into it must not be taken for the server's value.
            if pages.has_copied_pages(found.address, layout.nbytes):
                pages.drop(found.address, layout.nbytes)
            found.is_leased = False
        return found

    def __contains__(self, variable: int) -> bool:
        return variable in self._layouts

    def version(self, variable: int) -> int:
        """Its version now; while it is written the one before."""
        return versioned_page.version_of(self._words[self._layouts[variable].word_index])

    def copy(self, variable: int, target: torch.Tensor) -> int | None:
        """Copies a variable's value.

        Args:
            variable: its number.
            target: of as many bytes, contiguous.

        Returns:
            The version of the copy; ``None`` if that was not possible: ask the server.
        """
        dtype, shape = target.dtype, target.shape
        found = self._read(self._layouts[variable], lambda buffer: target.copy_(buffer.tensor(dtype, shape)))
        return None if found is None else versioned_page.version_of(found[1])

    def clone(self, variable: int, like: torch.Tensor) -> tuple[torch.Tensor, int] | None:
        """A new tensor with a variable's value.

        Args:
            variable: its number.
            like: has the variable's shape and dtype.

        Returns:
            The tensor and its version; ``None`` if that was not possible: ask the server.
        """
        found = self._read(self._layouts[variable], lambda buffer: buffer.tensor(like.dtype, like.shape).clone())
        return None if found is None else (found[0], versioned_page.version_of(found[1]))

    def rows(self, variable: int, numbers: torch.Tensor, target: torch.Tensor) -> bool:
        """Copies some rows of a variable.

        Args:
            variable: its number.
            numbers: int64 row numbers.
            target: one row for each number, with the variable's dtype.

        Returns:
            Whether that was possible: not if the variable was being written all the time, a number is out of range, or
            the server has ended.
        """
        layout, row_bytes = self._layouts[variable], target.nbytes // max(numbers.numel(), 1)
        if row_bytes == 0:
            return False
        shape = (layout.nbytes // row_bytes, *target.shape[1:])
        low, high = torch.aminmax(numbers)
        if int(low) < 0 or int(high) >= shape[0]:
            return False

        def pick(buffer: _Buffer) -> None:
            torch.index_select(buffer.tensor(target.dtype, shape), 0, numbers, out=target)

        return self._read(layout, pick) is not None

    def _read(self, layout: _Layout, take: Callable[[_Buffer], _T]) -> tuple[_T, int] | None:
        """What ``take`` gives, and the word of it; ``None`` if that was not possible: then the server is asked."""
        for _ in range(TRIES):
            before: int = self._words[layout.word_index]
            if before & WRITING:
                os.sched_yield()
                continue
            buffer = self._buffer(layout, versioned_page.buffer_of(before))
            if buffer is None or buffer.is_leased:
                return None  # this process may have written into its pages
            taken = take(buffer)
            if self._words[layout.word_index] == before:
                return taken, before
        return None

    # ---- values used in place ---------------------------------------------------------------------------------

    def lease(self, variable: int) -> tuple[torch.Tensor, int] | None:
        """A variable's bytes where they are; the server leaves them alone as long as any tensor refers to them.

        What is written into them is seen by this process alone.

        Args:
            variable: its number.

        Returns:
            The bytes and their version; ``None`` if that is not possible now: then copy.
        """
        layout = self._layouts[variable]
        if layout.marks is None or self._column < 0:
            return None
        self.sweep()
        for _ in range(TRIES):
            word = int(self._words[layout.word_index])
            if word & WRITING:
                os.sched_yield()
                continue
            if not word & LEASABLE:
                return None
            number = versioned_page.buffer_of(word)
            mark = number * COLUMNS + self._column
            buffer = self._buffer(layout, number)
            if buffer is None:
                return None
            layout.marks[mark] = 1
            fence()
            if int(self._words[layout.word_index]) != word:
                if not buffer.uses:
                    layout.marks[mark] = 0
                continue
            if buffer.is_leased:
                return None  # an earlier tensor of this process is there, which may have been written into
            holder = memoryview(buffer.memory)
            buffer.uses, buffer.is_leased = buffer.uses + 1, True
            self._leases.append((weakref.ref(holder), buffer, layout.marks, mark))
            return torch.frombuffer(holder, dtype=torch.uint8), versioned_page.version_of(word)
        return None

    def sweep(self) -> None:
        """Gives back what no tensor refers to any more."""
        if not any(entry[0]() is None for entry in self._leases):
            return
        kept = []
        for entry in self._leases:
            holder, buffer, marks, mark = entry
            if holder() is not None:
                kept.append(entry)
                continue
            buffer.uses -= 1
            if not buffer.uses:
                marks[mark] = 0
        self._leases = kept

    def keep(self) -> None:
        """Never gives back what is in use now: this process was copied, and its copy may use it too."""
        for holder, *_ in self._leases:
            _kept.append(holder())


_readers: weakref.WeakSet[ValueReader] = weakref.WeakSet()
_kept: list[Any] = []


def _keep_all() -> None:
    for reader in list(_readers):
        reader.keep()


os.register_at_fork(after_in_parent=_keep_all)
