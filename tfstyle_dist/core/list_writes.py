"""Marks what torch writes to lists of tensors without saying so.

Who wrote to a parameter or a gradient outside of ``run`` is seen by the tensor's version, which torch counts up with
every write. Some functions for lists of tensors leave it as it is: those of gradient scalers and fused optimizers
everywhere, others (averages of weights, ``torch.nn.utils.clip_grad_norm_``) where one kernel of a GPU writes to all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from tfstyle_dist.core.devices import any_accelerator
from tfstyle_dist.core.process_hooks import CountedUsers, Patch
from tfstyle_dist.core.torch_internals import LIST_WRITES, UNMARKED_WRITES


def _first_marked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    if not torch.compiler.is_compiling():
        increment_version(args[0] if args else kwargs["self"])
    return found


def _all_marked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    if not torch.compiler.is_compiling():
        for given in (*args, *kwargs.values()):
            if isinstance(given, list | tuple):
                increment_version(given)
    return found


class _ListWrites(CountedUsers):
    """The functions, wrapped as long as somebody needs it; on a machine without an accelerator few are."""

    def __init__(self) -> None:
        super().__init__()
        self._unmarked = [Patch(torch, name, _all_marked) for name in UNMARKED_WRITES]
        self._on_accelerators = [Patch(torch, name, _first_marked) for name in LIST_WRITES]

    def _needed(self, first: bool) -> None:
        for patch in self._patches():
            patch.install()

    def _not_needed(self, last: bool) -> None:
        for patch in self._patches():
            patch.uninstall()

    def _patches(self) -> list[Patch]:
        return self._unmarked + (self._on_accelerators if any_accelerator() else [])


list_writes = _ListWrites()
"""Installed while a strategy that adopts modules lives."""
