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

from tfstyle_dist.core.process_hooks import Hooks, Patch
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


list_writes = Hooks(patches=[Patch(torch, name, _all_marked) for name in UNMARKED_WRITES])
"""Installed while a strategy that adopts modules lives."""

list_writes_on_accelerators = Hooks(patches=[Patch(torch, name, _first_marked) for name in LIST_WRITES])
"""The same, on a machine with an accelerator."""
