"""What is inside of numpy arrays of few numbers, and of torch's, Python's and numpy's generators: each replica's own.

All replicas begin with the same, and each goes on from there. Longer arrays are data, one for all.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tfstyle_dist.variables.content.copies import OWN_GENERATORS

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


def has_inner_state(value: Any) -> bool:
    """Whether each replica has its own of what is inside: of such an array, or a generator of Python or numpy.

    A generator of the program's own class is an object like any other one: it may draw by its attributes.
    """
    return is_own_array(value) or type(value) in _GENERATORS


class _Kept:
    """One array or generator: what is in it for each replica, and what cross-replica context had when a run ended."""

    __slots__ = ("look", "mark", "read", "same", "value", "values", "write")

    def __init__(self, value: Any, count: int) -> None:
        of_torch = isinstance(value, torch.Generator)
        self.read, self.write, self.look = _OF_TORCH if of_torch else _GENERATORS.get(type(value), _OF_ARRAYS)
        self.value, self.values, self.mark = value, [self.read(value)] * count, self.look(value)
        self.same = value, value


class InnerStates:
    """The arrays whose elements, and the generators whose states, are exchanged in each turn.

    Numpy resizes no array that something refers to weakly, and before torch 2.13 nothing refers so to a generator of
    torch: they are held until a run finds that nobody else does.

    Args:
        let_go: called with the ``id`` of what nobody else holds.

    Attributes:
        kept: what is known of each; where there is none, nothing else needs to be asked.
    """

    def __init__(self, let_go: Callable[[int], None]) -> None:
        self._let_go = let_go
        self.kept: list[_Kept] = []

    def add(self, value: Any, count: int) -> tuple[Any, Any]:
        """Gives each replica what is in an array or generator now, and returns what others have in its place: the same.

        Args:
            value: for which ``has_inner_state`` is true, or a generator of torch.
            count: of the replicas.
        """
        self.kept.append(_Kept(value, count))
        return self.kept[-1].same

    def switch(self, before: int, after: int) -> None:
        """They have what replica ``before`` has made of them; they get that of ``after``."""
        for kept in self.kept:
            kept.values[before] = kept.read(kept.value)
        for kept in self.kept:  # then: two generators of numpy may draw from one stream
            kept.write(kept.value, kept.values[after])

    def renew(self, everything: bool) -> None:
        """What cross-replica context has written to is as it left it for all replicas.

        Args:
            everything: all are.
        """
        for kept in self.kept:
            if everything or kept.look(kept.value) != kept.mark:
                kept.values[:] = [kept.read(kept.value)] * len(kept.values)

    def mark(self) -> None:
        """Remembers all as they are."""
        for kept in self.kept:
            kept.mark = kept.look(kept.value)

    def generators(self) -> list[tuple[torch.Generator, list[torch.Tensor]]]:
        """Those of torch that somebody else holds, with the state of each for every replica."""
        held = [kept for kept in self.kept if isinstance(kept.value, torch.Generator)]
        return [(kept.value, kept.values) for kept in held if _references(kept) > _ALONE]

    def drop_dead(self) -> None:
        """Forgets those that nobody else holds."""
        gone = [kept for kept in self.kept if _references(kept) <= _ALONE]
        if gone:
            self.kept = [kept for kept in self.kept if kept not in gone]
            for kept in gone:
                self._let_go(id(kept.value))


def _look(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.tobytes()


def _write(array: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    if array.size == values.size and array.flags.writeable:  # its form may have been changed in place
        array[...] = values.reshape(array.shape)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _look_at_torch(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _look_at_state(generator: Any) -> bytes:
    return pickle.dumps(_state(generator))


_Ways = tuple[Callable[[Any], Any], Callable[[Any, Any], object], Callable[[Any], Any]]
"""How to read, to write and to compare what is in an object."""
_OF_ARRAYS: _Ways = np.ndarray.copy, _write, _look
_OF_TORCH: _Ways = torch.Generator.get_state, torch.Generator.set_state, _look_at_torch
_GENERATORS: dict[type, _Ways] = {
    random.Random: (random.Random.getstate, random.Random.setstate, random.Random.getstate),
    np.random.Generator: (_state, _set_state, _look_at_state),
    np.random.RandomState: (_state, _set_state, _look_at_state),
}


def _references(kept: _Kept) -> int:
    return sys.getrefcount(kept.value)


_ALONE = _references(_Kept(np.zeros(1), 1))
