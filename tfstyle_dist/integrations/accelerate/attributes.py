"""What a forward leaves on the modules of a model, such as an auxiliary loss, when it computes shares of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_OF_TORCH = frozenset(vars(torch.nn.Module()))
_ABSENT = object()


class Attributes:
    """The attributes of all modules of a model: each share begins with the same, and what they leave is put together.

    Lists and dicts that are attributes themselves are kept with what they hold; what lies deeper is not.

    Args:
        model: as it is before the first share.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._kept = [_Kept(module) for module in model.modules()]
        self._left: list[list[dict[str, Any]]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def take(self) -> None:
        """Notes what a share has left, and puts back what was there before it."""
        self._left.append([kept.take() for kept in self._kept])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, lengths: Sequence[int]) -> None:
        """Gives the modules what the shares left.

        Args:
            lengths: the examples of each share.
        """
        for kept, *left in zip(self._kept, *self._left, strict=True):
            for name, first in left[0].items():
                values = [entries.get(name, _ABSENT) for entries in left]
                kept.put(name, first if any(v is _ABSENT for v in values) else joined(values, lengths))


class _Kept:
    """The attributes of one module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._now, self._before = vars(module), dict(vars(module))
        own = {name: value for name, value in self._before.items() if name not in _OF_TORCH}
        self._contents = {name: value.copy() for name, value in own.items() if type(value) in (list, dict)}

    def take(self) -> dict[str, Any]:
        left = {name: value for name, value in self._now.items() if self._before.get(name, _ABSENT) is not value}
        for name, was in self._contents.items():
            held = self._before[name]
            if not _same_entries(held, was):
                left.setdefault(name, held.copy())
                _refill(held, was)
        self._now.clear()
        self._now.update(self._before)
        return left

    def put(self, name: str, value: Any) -> None:
        held = self._before.get(name)
        if name in self._contents and type(value) is type(held):
            _refill(held, value)
        else:
            self._now[name] = value


def _same_entries(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and _same_entries(list(one.values()), list(other.values()))
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _refill(held: Any, entries: Any) -> None:
    held.clear()
    (held.update if isinstance(held, dict) else held.extend)(entries)


def joined(values: Sequence[Any], lengths: Sequence[int]) -> Any:
    """One value from those of the shares; of what is not known to belong to the examples that of the first.

    Single numbers with a fraction are the mean over the examples; tensors with an entry for each example follow each
    other; lists, tuples and dicts are put together entry by entry. A tensor that is the same for all shares is no part
    of them, such as a table that was made once.

    Args:
        values: one of each share.
        lengths: the examples of each share.
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return first
    if isinstance(first, torch.Tensor):
        return _joined_tensors(values, lengths)
    if isinstance(first, float):
        return sum(value * length for value, length in zip(values, lengths, strict=True)) / max(sum(lengths), 1)
    if isinstance(first, Mapping) and type(first) is dict and all(value.keys() == first.keys() for value in values):
        return {key: joined([value[key] for value in values], lengths) for key in first}
    if type(first) in (list, tuple) and all(len(value) == len(first) for value in values):
        return type(first)(joined(column, lengths) for column in zip(*values, strict=True))
    return first


def _joined_tensors(values: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    first = values[0]
    moved = [value.to(first.device) for value in values]
    if first.dim() == 0 and first.is_floating_point():
        weights = [length / max(sum(lengths), 1) for length in lengths]
        return torch.stack([v * weight for v, weight in zip(moved, weights, strict=True)]).sum()
    per_example = first.dim() > 0 and all(
        v.shape == (length, *first.shape[1:]) for v, length in zip(values, lengths, strict=True)
    )
    if not per_example or (not first.requires_grad and all(torch.equal(v, first) for v in moved)):
        return first
    return torch.cat(moved)
