"""Marks what is written to lists of tensors on an accelerator.

Who wrote to a parameter outside of ``run`` is seen by the tensor's version, which torch counts up with every write. Its
functions for lists of tensors (``torch.nn.utils.clip_grad_norm_``, averages of weights, optimizers) write to all of
them with one kernel on a GPU, and many leave the versions as they are; on the CPU none does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from tfstyle_dist.core.devices import any_accelerator
from tfstyle_dist.core.process_hooks import CountedUsers, Patch
from tfstyle_dist.core.torch_internals import LIST_WRITES


def _marked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    if not torch.compiler.is_compiling():
        increment_version(args[0] if args else kwargs["self"])
    return found


class _ListWrites(CountedUsers):
    """The functions, wrapped as long as somebody needs it; on a machine without an accelerator none is."""

    def __init__(self) -> None:
        super().__init__()
        self._patches = [Patch(torch, name, _marked) for name in LIST_WRITES]
        self._installed: list[Patch] = []

    def _needed(self, first: bool) -> None:
        if first and any_accelerator():
            self._installed = self._patches
        for patch in self._installed:
            patch.install()

    def _not_needed(self, last: bool) -> None:
        for patch in self._installed:
            patch.uninstall()
        if last:
            self._installed = []


list_writes = _ListWrites()
"""Installed while a strategy that adopts modules lives."""
