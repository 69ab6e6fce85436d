"""Weak references to tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdRef

from tfstyle_dist.core.torch_releases import release
from tfstyle_dist.core.untraced import untraced


@untraced
def _that_keeps(tensor: torch.Tensor, gone: Callable[[Any], Any] | None = None) -> Any:
    return WeakIdRef(tensor, gone)


_kind: Any = _that_keeps if release(torch.__version__) < (2, 11) else weakref.ref

refer_to: type[weakref.ref[torch.Tensor]] = _kind
"""``weakref.ref`` for a tensor, with the same arguments.

Before torch 2.11 a tensor that the program has let go, while a graph still has it, comes back through a plain weak
reference without its memory being kept: once the graph is gone as well, reading it ends the process.
"""
