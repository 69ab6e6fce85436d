"""Numpy arrays of few numbers: each replica has elements of its own in them. Longer ones are data, one for all."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from tfstyle_dist.variables.copies import OWN_GENERATORS

MOST_NUMBERS = 1000
"""Of an array that is copied whenever the turn passes."""
_MOST_ARRAYS = 64
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

    __slots__ = ("mark", "reference", "values")

    def __init__(self, array: np.ndarray[Any, Any], count: int, gone: Callable[[Any], None]) -> None:
        self.reference = weakref.ref(array, gone)
        self.values, self.mark = [array.copy()] * count, array.tobytes()


class OwnArrays:
    """The arrays whose elements are exchanged when the turn passes.

    Attributes:
        kept: what is known of each; where there is none, nothing else needs to be asked.
    """

    def __init__(self) -> None:
        self.kept: list[_Kept] = []

    def add(self, array: np.ndarray[Any, Any], count: int, gone: Callable[[Any], None]) -> bool:
        """Gives each of ``count`` replicas the elements that an array has; false if there are too many arrays.

        Args:
            array: one for which ``is_own_array`` is true.
            count: of the replicas.
            gone: called when it is gone.
        """
        if len(self.kept) >= _MOST_ARRAYS:
            return False
        self.kept.append(_Kept(array, count, gone))
        return True

    def switch(self, before: int, after: int) -> None:
        """The arrays have the elements of replica ``before``; they get those of ``after``."""
        for array, kept in self._living():
            kept.values[before] = array.copy()
            _write(array, kept.values[after])

    def renew(self, everything: bool) -> None:
        """Arrays that cross-replica context has written to are as it left them for all replicas.

        Args:
            everything: all arrays are.
        """
        for array, kept in self._living():
            if everything or array.tobytes() != kept.mark:
                kept.values[:] = [array.copy()] * len(kept.values)

    def mark(self) -> None:
        """Remembers the elements as they are."""
        for array, kept in self._living():
            kept.mark = array.tobytes()

    def _living(self) -> list[tuple[np.ndarray[Any, Any], _Kept]]:
        return [(array, kept) for kept in self.kept if (array := kept.reference()) is not None]

    def drop_dead(self) -> None:
        """Forgets those that are gone."""
        self.kept = [kept for kept in self.kept if kept.reference() is not None]


def _write(array: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    if array.shape == values.shape and array.flags.writeable:
        array[...] = values
