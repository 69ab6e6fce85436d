"""Names in a trace of ``torch.profiler``; costs next to nothing while no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from tfstyle_dist.core import torch_internals

PREFIX = "tfstyle_dist: "
_NOTHING = nullcontext()


def region(what: str, name: str = "") -> AbstractContextManager[object]:
    """Shows a block as ``tfstyle_dist: what name`` in the trace of a profiler that runs.

    Args:
        what: the kind of work, e.g. ``"all_reduce"``.
        name: of the single call, e.g. ``"gradients[0]"``.
    """
    # True in every thread while torch.profiler.profile or torch.autograd.profiler.profile is active.
    if not torch_internals.is_profiling():
        return _NOTHING
    return torch.profiler.record_function(f"{PREFIX}{what} {name}".rstrip())
