"""One nest of the batches of a worker's replicas."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.input.split import is_leaf
from tfstyle_dist.values import PerReplica

Path = tuple[Any, ...]
"""The keys and numbers that lead to an entry of a batch."""
Lists = frozenset[Path]
"""Where the lists of a batch are that have an entry for each sample."""
_CONTAINERS = (dict, list, tuple)


def group(parts: Sequence[Any], lists: Lists | None = None, path: Path = ()) -> Any:
    """One nest of the replicas' batches: a ``PerReplica`` for each leaf; a single part as it is.

    Args:
        parts: one for each local replica.
        lists: of batches that were collated for each replica: these lists are leaves, and what differs is one, too.
        path: where in the batch the parts are.

    Raises:
        InvalidArgumentError: the batches are nests of different structures, and were not collated for each replica.
    """
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if all(p is None for p in parts):
        return None
    if any(is_leaf(p) for p in parts) or (lists is not None and path in lists):
        return PerReplica(parts)
    if any(isinstance(p, _CONTAINERS) for p in parts):
        if lists is not None and not all(_like(first, p) for p in parts):
            return PerReplica(parts)
        _check_alike(parts)
    if isinstance(first, dict):
        entries: Any = {k: group([p[k] for p in parts], lists, (*path, k)) for k in first}
        if type(first) is OrderedDict:
            return OrderedDict(entries)
        if type(first) is defaultdict:
            return defaultdict(first.default_factory, entries)
        return entries if type(first) is dict else PerReplica(parts)
    if isinstance(first, list | tuple):
        grouped = [group(column, lists, (*path, n)) for n, column in enumerate(zip(*parts, strict=True))]
        if hasattr(first, "_fields"):
            return type(first)(*grouped)  # a namedtuple
        return type(first)(grouped)
    return PerReplica(parts)


def _check_alike(parts: Sequence[Any]) -> None:
    first = parts[0]
    number = next((n for n, part in enumerate(parts) if not _like(first, part)), None)
    if number is not None:
        raise InvalidArgumentError(
            f"The batches of one step have different structures: replica 0 got {_in_words(first)}, replica {number} "
            f"got {_in_words(parts[number])}. Make all batches the same nest of tuples, lists and dicts. Where lists "
            "hold an entry for each sample, make them equally long (drop_last=True), or tensors with a row for each."
        )


def _like(first: Any, part: Any) -> bool:
    if isinstance(first, dict):
        return isinstance(part, dict) and part.keys() == first.keys()
    if isinstance(first, list | tuple):
        return isinstance(part, list | tuple) and len(part) == len(first)
    return not isinstance(part, _CONTAINERS)


def _in_words(part: Any) -> str:
    kind = type(part).__name__
    if isinstance(part, dict):
        return f"a {kind} with the keys {list(part)}"
    return f"a {kind} of {len(part)}" if isinstance(part, list | tuple) else f"a {kind}"
