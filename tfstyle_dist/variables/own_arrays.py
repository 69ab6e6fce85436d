"""Numpy arrays of few numbers: each replica has elements of its own in them. Longer ones are data, one for all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tfstyle_dist.variables.copies import OWN_GENERATORS

MOST_NUMBERS = 1000
"""Of an array that is copied whenever the turn passes."""
KINDS = "biufc"
"""Of arrays: those of numbers."""
_OF_ONE = frozenset({
    "_asyncio", "_io", "_queue", "_socket", "_thread", "asyncio", "concurrent", "multiprocessing", "numpy", "pandas",
    "queue", "socket", "sqlite3", "subprocess", "threading",
})  # fmt: skip
"""Of these packages an object is one for all replicas, and so is a helper that has it."""


def is_common(value: Any, arrays: bool = True) -> bool:
    """Whether there is one of this for all replicas, so that what belongs to it must be one as well.

    Args:
        value: anything.
        arrays: whether replicas have elements of their own.
    """
    module = type(value).__module__
    if module.partition(".")[0] not in _OF_ONE or module in OWN_GENERATORS or isinstance(value, np.generic):
        return False
    return not (arrays and is_own_array(value))


def is_own_array(value: Any) -> bool:
    """Whether this is an array of few numbers, with memory of its own."""
    return (
        type(value) is np.ndarray
        and value.dtype.kind in KINDS
        and 0 < value.size <= MOST_NUMBERS
        and value.flags.owndata
        and value.flags.writeable
    )


class _Kept:
    """One array: its elements for each replica, and what cross-replica context had when a run ended."""

    __slots__ = ("array", "mark", "values")

    def __init__(self, array: np.ndarray[Any, Any], count: int) -> None:
        self.array, self.values, self.mark = array, [array.copy()] * count, _look(array)


class OwnArrays:
    """The arrays whose elements are exchanged when the turn passes.

    Numpy resizes no array that something refers to weakly, so they are held until a run finds that nobody else does.

    Args:
        let_go: called with the ``id`` of what nobody else holds.

    Attributes:
        kept: what is known of each; where there is none, nothing else needs to be asked.
    """

    def __init__(self, let_go: Callable[[int], None]) -> None:
        self._let_go = let_go
        self.kept: list[_Kept] = []

    def add(self, array: np.ndarray[Any, Any], count: int) -> None:
        """Gives each of ``count`` replicas the elements that an array has, one for which ``is_own_array`` is true."""
        self.kept.append(_Kept(array, count))

    def switch(self, before: int, after: int) -> None:
        """The arrays have the elements of replica ``before``; they get those of ``after``."""
        for kept in self.kept:
            kept.values[before] = kept.array.copy()
            _write(kept.array, kept.values[after])

    def renew(self, everything: bool) -> None:
        """Arrays that cross-replica context has written to are as it left them for all replicas.

        Args:
            everything: all arrays are.
        """
        for kept in self.kept:
            if everything or _look(kept.array) != kept.mark:
                kept.values[:] = [kept.array.copy()] * len(kept.values)

    def mark(self) -> None:
        """Remembers the elements as they are."""
        for kept in self.kept:
            kept.mark = _look(kept.array)

    def drop_dead(self) -> None:
        """Forgets those that nobody else holds."""
        gone = [kept for kept in self.kept if _references(kept) <= _ALONE]
        if gone:
            self.kept = [kept for kept in self.kept if kept not in gone]
            for kept in gone:
                self._let_go(id(kept.array))


def _look(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.tobytes()


def _write(array: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    if array.size == values.size and array.flags.writeable:  # its form may have been changed in place
        array[...] = values.reshape(array.shape)


def _references(kept: _Kept) -> int:
    return sys.getrefcount(kept.array)


_ALONE = _references(_Kept(np.zeros(1), 1))
