"""Settings that modules have and that all replicas of a process share: an ``argparse.Namespace`` and the like.

They are the program's own, as are lists and numbers: many modules, and the script itself, read one. A number in them
that ``forward`` multiplies or counts up advances once for each replica, which ``SharedSettings`` says.
"""

from __future__ import annotations

import argparse
import types
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.variables.copies import is_container

_MOST = 1000
"""Of entries, which are data if they are more, and of numbers that are compared."""
_DEPTH = 3
_NUMBERS = frozenset({bool, int, float})
_NAMES = frozenset({str, int})
_SPACES = (argparse.Namespace, types.SimpleNamespace)

Place = tuple[int, int | str, str]
"""An object by its ``id``, which settings of it (the number of a group, or how it is called), and the name of one."""


class ModuleSettings:
    """Those that the attributes of some objects are, looked for after 0, 1, 3, 7, ... runs."""

    def __init__(self) -> None:
        self._runs = 0
        self._holders: list[tuple[weakref.ref[Any], str]] = []  # an object, and the name of its attribute

    def __bool__(self) -> bool:
        return bool(self._holders)

    def begin(self, things: list[tuple[Any, Any]]) -> None:
        """A run begins.

        Args:
            things: the objects whose attributes are content, each with its content.
        """
        self._runs += 1
        if self._runs & (self._runs - 1):
            return
        found = {
            id(value): (weakref.ref(thing), name)
            for thing, _ in reversed(things)
            for name, value in list(thing.__dict__.items())
            if _are_settings(value)
        }
        self._holders = list(found.values())

    def now(self) -> dict[Place, Any]:
        """The first numbers in them; of settings that cannot be looked into none."""
        try:
            return self._now()
        except Exception as error:
            self._holders = []
            get_logger().debug("Whether a step counts in settings is not looked at: %r", error)
            return {}

    def _now(self) -> dict[Place, Any]:
        found: dict[Place, Any] = {}
        for reference, name in self._holders:
            thing = reference()
            if thing is not None and _are_settings(value := thing.__dict__.get(name)):
                found |= islice(_numbers(value, f"{type(thing).__name__}.{name}", _DEPTH), _MOST)
        return found


def _are_settings(value: Any) -> bool:
    kind = type(value)
    return issubclass(kind, _SPACES) or (issubclass(kind, dict) and not is_container(value))


def _numbers(settings: Any, called: str, depth: int) -> Iterator[tuple[Place, Any]]:
    entries = settings if isinstance(settings, dict) else vars(settings)
    if dict.__len__(entries) > _MOST:
        return
    for name, value in list(dict.items(entries)):
        if type(value) in _NUMBERS and type(name) in _NAMES:
            yield (id(settings), called, str(name)), repr(value) if type(value) is float else value
        elif depth and _are_settings(value):
            yield from _numbers(value, f"{called}.{name}", depth - 1)
