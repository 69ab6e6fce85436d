"""Auxiliary losses that a forward leaves in attributes of modules, when it computes shares of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class AuxiliaryLosses:
    """Attributes that each share sets anew to a loss, or to a list, tuple or dict of losses: the shares' mean stays.

    A loss is a single number with a graph, or any single number where no graphs are made. Of all other attributes the
    last share's stays.

    Args:
        model: as it is before the first share.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [vars(module) for module in model.modules()]
        self._before = [dict(attributes) for attributes in self._modules]
        self._left: list[list[dict[str, Any]]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def take(self) -> None:
        """Notes what a share has set."""
        left = []
        for attributes, before in zip(self._modules, self._before, strict=True):
            left.append({name: value for name, value in attributes.items() if before.get(name) is not value})
            before.update(left[-1])
        self._left.append(left)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, weights: Sequence[float]) -> None:
        """Gives the modules the mean of the shares' losses.

        Args:
            weights: of the shares; their sum is 1.
        """
        for attributes, *left in zip(self._modules, *self._left, strict=True):
            for name in left[0]:
                mean = mean_of([share.get(name) for share in left], weights)
                if mean is not None:
                    attributes[name] = mean


def mean_of(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The mean of one loss of each share, or of nests of them that are alike; ``None`` if they are anything else.

    Args:
        values: one of each share.
        weights: of the shares.
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return None
    if isinstance(first, torch.Tensor):
        if not all(map(_is_loss, values)):
            return None
        return torch.stack([v.to(first.device) * w for v, w in zip(values, weights, strict=True)]).sum()
    if type(first) not in (list, tuple, dict) or not first or any(len(value) != len(first) for value in values):
        return None
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in values):
            return None
        means = {name: mean_of([value[name] for value in values], weights) for name in first}
        return None if any(mean is None for mean in means.values()) else means
    entries = [mean_of(column, weights) for column in zip(*values, strict=True)]
    return None if any(entry is None for entry in entries) else type(first)(entries)


def _is_loss(value: torch.Tensor) -> bool:
    made_here = not torch.is_grad_enabled() or (value.requires_grad and not value.is_leaf)
    return value.dim() == 0 and value.is_floating_point() and made_here
