"""Objects whose attributes are in ``__slots__``: they have no ``__dict__`` that could be exchanged."""

from __future__ import annotations

import types
from typing import Any


def slots_of(kind: type) -> dict[str, Any]:
    """The descriptors of a class by name, if all attributes of its objects are in slots; else none."""
    if kind.__dictoffset__:
        return {}
    found: dict[str, Any] = {}
    for one in reversed(kind.__mro__):
        if "__slots__" in vars(one):
            found |= {name: held for name, held in vars(one).items() if isinstance(held, types.MemberDescriptorType)}
    return found


class Slots:
    """Stands for an object: its ``__dict__`` is what that has in its slots.

    Attributes:
        same: the object, and what other replicas have in its place: the same.
    """

    __slots__ = ("__weakref__", "_descriptors", "_held", "same")

    def __init__(self, thing: Any) -> None:
        self.same, self._descriptors = (thing, thing), slots_of(type(thing))
        self._held: dict[str, Any] = {}

    @property
    def __dict__(self) -> dict[str, Any]:
        """The same dict until another one is set, with what is in the slots now."""
        self._held.clear()
        for name, slot in self._descriptors.items():
            try:
                self._held[name] = slot.__get__(self.same[0])
            except AttributeError:  # nothing
                continue
        return self._held

    @__dict__.setter
    def __dict__(self, attributes: dict[str, Any]) -> None:
        thing, had = self.same[0], self.__dict__
        for name in had.keys() - attributes.keys():
            self._descriptors[name].__delete__(thing)
        for name, value in attributes.items():
            if had.get(name, had) is not value:
                self._descriptors[name].__set__(thing, value)
        self._held = attributes
