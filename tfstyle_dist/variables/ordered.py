"""A set that keeps nothing alive and remembers the order, so that it is the same on all workers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

_Item = TypeVar("_Item")


class WeakOrderedSet(Generic[_Item]):
    """Iterates in the order in which the items were added.

    Items are told apart by identity, and nothing is asked of them: modules of other libraries may have a hash that
    changes with their values, as metrics of torchmetrics have, may not be compared, as parameters of tensordict, or may
    not answer before they are whole, as wrappers of peft.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[Any], list[Any]]] = {}

    def add(self, item: _Item) -> list[Any]:
        """Adds an item; one that is there already stays in its place.

        Returns:
            A list that lives as long as the item.
        """
        items, number = self._items, id(item)
        if number not in items:
            items[number] = weakref.ref(item, lambda _: items.pop(number, None)), []
        return items[number][1]

    def __contains__(self, item: object) -> bool:
        return id(item) in self._items

    def of_each(self, attribute: str) -> list[Any]:
        """An attribute of each item, ``None`` where it has none; for sets that are looked at very often."""
        return [getattr(reference(), attribute, None) for reference, _ in list(self._items.values())]

    def __iter__(self) -> Iterator[_Item]:
        for reference, _ in list(self._items.values()):
            if (item := reference()) is not None:
                yield item
