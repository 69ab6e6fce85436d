"""Which saved parameter group of an optimizer is which one here, and whether both are of one kind of optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_COMMON = frozenset(cls.__name__ for cls in torch.optim.Optimizer.__mro__)
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
"""What schedulers of torch write into the groups of any optimizer."""


def paired(here: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> list[int] | None:
    """For each group here the number of the saved one that has its parameters.

    One that has none of the saved parameters is the next of those that are left. A group may have parameters that were
    not saved, and a saved one more than there are here.

    Args:
        here: the names of each group's parameters.
        saved: as many groups.

    Returns:
        ``None`` if a group has parameters of several saved ones, or two have some of the same one.
    """
    group_of = {name: number for number, names in enumerate(saved) for name in names}
    found = [{group_of[name] for name in names if name in group_of} for names in here]
    taken = [number for numbers in found for number in numbers]
    if len(set(taken)) < len(taken) or any(len(numbers) > 1 for numbers in found):
        return None
    left = iter([number for number in range(len(saved)) if number not in taken])
    return [numbers.pop() if numbers else next(left) for numbers in found]


def described(optimizer: Any) -> dict[str, list[str]]:
    """The names of an optimizer's classes, its own first, and of what its groups are set to."""
    names = [cls.__name__ for cls in type(optimizer).__mro__ if cls.__name__ not in _COMMON]
    return {"names": names, "settings": sorted(getattr(optimizer, "defaults", ()))}


def misfit(optimizer: Any, saved: Mapping[str, Sequence[str]] | None, groups: Sequence[Mapping[str, Any]]) -> str:
    """Says that the state of another kind of optimizer was saved; nothing if it was of this one.

    Classes that are derived of each other, or have the same settings, may take each other's state, as in torch.

    Args:
        optimizer: the one here.
        saved: what ``described`` said; ``None`` in a checkpoint of an earlier version, which has no such entry.
        groups: the saved ones.
    """
    own = described(optimizer)
    mine = own["names"][0] if own["names"] else type(optimizer).__name__
    if saved is not None:
        if set(own["names"]) & set(saved["names"]) or own["settings"] == list(saved["settings"]):
            return ""
        return f"is an optimizer of class {mine}, saved was one of class {saved['names'][0]}"
    known = _OF_SCHEDULERS.union(own["settings"], *(group.keys() for group in optimizer.param_groups))
    keys = set[str]().union(*(group.keys() for group in groups))
    lacks, foreign = sorted(set(own["settings"]) - keys), sorted(keys - known)
    if not groups or not lacks or not foreign:
        return ""
    return f"is an optimizer of class {mine} with {', '.join(lacks)}, saved was one with {', '.join(foreign)}"
