"""A set that keeps nothing alive and remembers the order, so that it is the same on all workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from tfstyle_dist.core.torch_internals import WeakIdKeyDictionary

_Item = TypeVar("_Item")


class WeakOrderedSet(Generic[_Item]):
    """Iterates in the order in which the items were added.

    Items are told apart by identity: modules of other libraries may have a hash that changes with their values, as
    metrics of torchmetrics have, or may not be compared, as parameters of tensordict.
    """

    def __init__(self) -> None:
        self._items: Any = WeakIdKeyDictionary()

    def add(self, item: _Item) -> None:
        """Adds an item; one that is there already stays in its place."""
        self._items.setdefault(item, None)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[_Item]:
        return iter(self._items)
