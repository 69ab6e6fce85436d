"""Sleeping on a word of shared memory until another process writes it: Linux futexes."""

from __future__ import annotations

import ctypes
import mmap
import platform

_NUMBERS = {"x86_64": 202, "AMD64": 202}  # of the system call
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """The words of a memory map, at which processes wait.

    Args:
        memory: the shared map; words are numbered in units of 8 bytes, their lower halves are waited at.
        limit_seconds: longest sleep.
    """

    def __init__(self, memory: mmap.mmap, limit_seconds: float) -> None:
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._number = ctypes.c_long(_NUMBERS[platform.machine()])
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._limit = _Time(int(limit_seconds), int(limit_seconds % 1 * 1e9))

    def wait(self, word: int, value: int) -> None:
        """Sleeps while the word holds ``value``, until woken or the limit is over; may return early."""
        address, wanted = ctypes.c_void_p(self._start + 8 * word), ctypes.c_uint32(value & 0xFFFFFFFF)
        self._call(self._number, address, _WAIT, wanted, ctypes.byref(self._limit), None, 0)

    def wake(self, word: int) -> None:
        """Wakes all who wait at the word."""
        address = ctypes.c_void_p(self._start + 8 * word)
        self._call(self._number, address, _WAKE, _EVERYBODY, None, None, 0)
