"""What modules have and all replicas of a process share: settings in a dict of a class of its own, arrays, iterators.

They are the program's own, as are lists and numbers: many modules, and the script itself, read one. A number in them
that ``forward`` multiplies or counts up advances once for each replica, which ``SharedSettings`` says. So does an
element of a numpy array that ``forward`` writes to, and an iterator that it, or a step function, asks for a value; and
a number that their classes have (``type(self).calls += 1``).
"""

from __future__ import annotations

import argparse
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.variables.content.copies import is_container
from tfstyle_dist.variables.content.discovery import is_of_library
from tfstyle_dist.variables.content.inner_states import KINDS
from tfstyle_dist.variables.content.iterators import Position, is_iterator

_MOST = 1000
"""Of entries, which are data if they are more, and of numbers that are compared."""
_MOST_ARRAYS = 16
"""Whose elements are compared, which takes some microseconds for each whenever the turn passes."""
_DEPTH = 3
_NUMBERS = frozenset({bool, int, float})
_NAMES = frozenset({str, int})
_SPACES = (argparse.Namespace, types.SimpleNamespace)

Place = tuple[int, int | str, str]
"""An object by its ``id``, which settings of it (the number of a group, or how it is called), and the name of one.

An iterator that a step function names has its class in the second place and no name.
"""


class Elements:
    """What is in a numpy array now; equal to another one with the same bytes."""

    __slots__ = ("_bytes", "_dtype")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        plain = np.asarray(array)
        self._bytes, self._dtype = plain.tobytes(), plain.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elements) and self._bytes == other._bytes

    def changed(self, now: Elements) -> set[int]:
        """The places of the elements that became others."""
        before, after = np.frombuffer(self._bytes, self._dtype), np.frombuffer(now._bytes, now._dtype)
        if len(before) != len(after):
            return set(range(len(after)))
        both = (before != before) & (after != after)  # a NaN that stayed one
        return set(np.flatnonzero((before != after) & ~both).tolist())


class ModuleSettings:
    """Those that the attributes of some objects are, and iterators that a step function names.

    Attributes:
        iterators: that a step function names.
        kinds: the classes of these objects, each with the names of its numbers; for one run.
    """

    def __init__(self) -> None:
        self.iterators: Sequence[Any] = ()
        self.kinds: Sequence[tuple[type, list[str]]] = ()
        self._holders: list[tuple[weakref.ref[Any], str]] = []  # an object, and the name of its attribute
        self._own: Mapping[int, Any] = {}

    def __bool__(self) -> bool:
        return bool(self._holders or self.iterators or self.kinds)

    def find(self, things: list[tuple[Any, Any]], own: Mapping[int, Any]) -> None:
        """Looks for them.

        Args:
            things: the objects whose attributes are content, each with its content.
            own: what is content, by ``id``; ``True`` where that is what is inside.
        """
        self._own = own
        found = {
            id(value): (weakref.ref(thing), name, isinstance(value, np.ndarray))
            for thing, _ in reversed(things)
            for name, value in list(thing.__dict__.items())
            if _are_settings(value) and not self._are_own(value)
        }
        arrays = [(thing, name) for thing, name, is_array in reversed(found.values()) if is_array]
        self._holders = [(thing, name) for thing, name, is_array in found.values() if not is_array]
        self._holders += arrays[:_MOST_ARRAYS]
        kinds = dict.fromkeys(kind for thing, _ in things for kind in type(thing).__mro__[:-1])
        numbers = [(kind, _names_of_numbers(kind)) for kind in kinds if not is_of_library(kind)]
        self.kinds = [(kind, names) for kind, names in numbers if names]

    def _are_own(self, value: Any) -> bool:
        known = self._own.get(id(value))
        return known is True or (known is not None and isinstance(value, argparse.Namespace))

    def now(self) -> dict[Place, Any]:
        """The first numbers in them, elements and positions; of settings that cannot be looked into none."""
        try:
            return self._now()
        except Exception as error:
            self._holders, self.iterators, self.kinds = [], (), ()
            get_logger().debug("Whether a step counts in settings is not looked at: %r", error)
            return {}

    def _now(self) -> dict[Place, Any]:
        found: dict[Place, Any] = {}
        for reference, name in self._holders:
            thing = reference()
            value = None if thing is None else thing.__dict__.get(name)
            if not _are_settings(value) or self._are_own(value):
                continue
            if isinstance(value, np.ndarray):
                found[id(value), type(thing).__name__, name] = Elements(value)
            elif is_iterator(type(value)):
                found[id(value), type(thing).__name__, name] = Position.of(value)
            else:
                found |= islice(_numbers(value, f"{type(thing).__name__}.{name}", _DEPTH), _MOST)
        for kind, names in self.kinds:
            held = vars(kind)
            found.update(((id(kind), f"the class {kind.__name__}", name), held.get(name)) for name in names)
        attributes = {place[0] for place in found}
        named = [iterator for iterator in self.iterators if id(iterator) not in attributes]
        return found | {(id(iterator), type(iterator).__name__, ""): Position.of(iterator) for iterator in named}


def _names_of_numbers(kind: type) -> list[str]:
    return [name for name, value in vars(kind).items() if type(value) in _NUMBERS and not name.startswith("__")]


def _are_settings(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, np.ndarray):
        return value.dtype.kind in KINDS and 0 < value.size <= _MOST
    return is_iterator(kind) or _have_entries(value)


def _have_entries(value: Any) -> bool:
    kind = type(value)
    return issubclass(kind, _SPACES) or (issubclass(kind, dict) and not is_container(value))


def _numbers(settings: Any, called: str, depth: int) -> Iterator[tuple[Place, Any]]:
    entries = settings if isinstance(settings, dict) else vars(settings)
    if dict.__len__(entries) > _MOST:
        return
    for name, value in list(dict.items(entries)):
        if type(value) in _NUMBERS and type(name) in _NAMES:
            yield (id(settings), called, str(name)), repr(value) if type(value) is float else value
        elif depth and _have_entries(value):
            yield from _numbers(value, f"{called}.{name}", depth - 1)
