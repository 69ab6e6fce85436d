"""A set that keeps nothing alive and remembers the order, so that it is the same on all workers."""

from __future__ import annotations

import weakref
from typing import TypeVar

_Item = TypeVar("_Item")


class WeakOrderedSet(weakref.WeakKeyDictionary[_Item, None]):
    """Iterates in the order in which the items were added."""

    def add(self, item: _Item) -> None:
        """Adds an item; one that is there already stays in its place."""
        self.setdefault(item, None)
