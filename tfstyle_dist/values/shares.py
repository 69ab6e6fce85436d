"""A mark on the tensors of a batch whose shares may differ in size from replica to replica."""

from __future__ import annotations

from typing import Any

import torch

_MARK = "_tfstyle_uneven"


def mark_uneven(leaf: Any) -> Any:
    """Marks a tensor of such a batch; returns it."""
    if isinstance(leaf, torch.Tensor):
        setattr(leaf, _MARK, True)
    return leaf


def is_uneven(leaf: Any) -> bool:
    """Whether ``leaf`` was marked."""
    return isinstance(leaf, torch.Tensor) and getattr(leaf, _MARK, False)
