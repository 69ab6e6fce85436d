"""The pages that this process has copied in a private mapping: found, and dropped."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence

import torch

PAGE = mmap.PAGESIZE
_POPULATE_READ = 22
_SCAN = 3 << 30 | 96 << 16 | ord("f") << 8 | 16
"""The kernel's PAGEMAP_SCAN, since Linux 6.7, and its categories of pages."""
_FILE, _PRESENT, _SWAPPED = 1 << 2, 1 << 3, 1 << 4
_RANGES = 64
# Of an entry of /proc/self/pagemap; see the kernel's Documentation/admin-guide/mm/pagemap.rst.
_ENTRY_SWAPPED, _ENTRY_FILE_OR_SHARED = 1 << 62, 1 << 61

_libc = ctypes.CDLL(None, use_errno=True)
_pagemap: dict[int, int] = {}  # by process: one that forks has pages of its own


def copied_pages(address: int, nbytes: int) -> list[tuple[int, int]] | None:
    """The ranges of bytes, in whole pages, that this process wrote in a private mapping and so has copies of.

    Args:
        address: of the first byte, at the beginning of a page.
        nbytes: how many to look at.

    Returns:
        Offsets from the address, in order; ``None`` where the kernel does not tell.
    """
    nbytes += -nbytes % PAGE
    try:
        handle = _pagemap.get(os.getpid())
        if handle is None:
            handle = _pagemap[os.getpid()] = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _scan(handle, address, nbytes)
    except OSError:
        return _read(handle, address, nbytes)


def has_copied_pages(address: int, nbytes: int) -> bool:
    """As ``copied_pages``, but whether there are any; ``True`` where the kernel does not tell."""
    return copied_pages(address, nbytes) != []


def drop(address: int, nbytes: int) -> None:
    """Gives the copies back: the mapping shows again what is shared."""
    _advise(address, nbytes, mmap.MADV_DONTNEED)


def populate(address: int, nbytes: int) -> None:
    """Maps the pages now rather than at the first read of each; a kernel that does not know this leaves it out."""
    _advise(address, nbytes, _POPULATE_READ)


def trim_heap() -> None:
    """Gives the system back what was freed between things that are still there; without glibc it stays the process'."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def ranges_of(numbers: Sequence[int], unit: int) -> list[tuple[int, int]]:
    """Ranges of ``unit`` times consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number * unit:
            found[-1] = (found[-1][0], (number + 1) * unit)
        else:
            found.append((number * unit, (number + 1) * unit))
    return found


def _advise(address: int, nbytes: int, advice: int) -> None:
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes + -nbytes % PAGE), advice)


def _scan(handle: int, address: int, nbytes: int) -> list[tuple[int, int]]:
    """Asks the kernel for the ranges; OSError if it is older than 6.7."""
    found: list[tuple[int, int]] = []
    regions = (ctypes.c_uint64 * (3 * _RANGES))()
    start, end, there = address, address + nbytes, _PRESENT | _SWAPPED
    while start < end:
        request = bytearray(
            struct.pack("<12Q", 96, 0, start, end, 0, ctypes.addressof(regions), _RANGES, 0, _FILE, _FILE, there, there)
        )
        count = int(fcntl.ioctl(handle, _SCAN, request))
        for region in range(count):
            low, high = regions[3 * region] - address, regions[3 * region + 1] - address
            if found and found[-1][1] == low:
                low = found.pop()[0]
            found.append((low, high))
        start = struct.unpack_from("<Q", request, 32)[0] if count == _RANGES else end
    return found


def _read(handle: int, address: int, nbytes: int) -> list[tuple[int, int]] | None:
    """Reads the entry of every page."""
    try:
        entries = bytearray(os.pread(handle, nbytes // PAGE * 8, address // PAGE * 8))
    except OSError:
        return None
    if len(entries) != nbytes // PAGE * 8:
        return None
    flags = torch.frombuffer(entries, dtype=torch.int64)
    there = (flags < 0) | ((flags & _ENTRY_SWAPPED) != 0)  # the sign bit says that the page is in memory
    own = there & ((flags & _ENTRY_FILE_OR_SHARED) == 0)
    return ranges_of(own.nonzero().flatten().tolist(), PAGE)
