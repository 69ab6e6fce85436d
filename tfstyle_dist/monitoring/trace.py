"""A trace of ``torch.profiler`` of all threads of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tfstyle_dist.core import torch_internals


@contextmanager
def record(path: Path) -> Iterator[Any]:
    """Profiles the block and writes a Chrome trace.

    Args:
        path: of the file; its folder is made.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Otherwise only the calling thread is seen: replicas 1, 2, ... have threads of their own.
    everything = torch_internals.profiler_config(profile_all_threads=True)
    # There is one cycle; without acc_events torch 2.11 and 2.12 warn that earlier ones are cleared.
    with torch.profiler.profile(activities=activities, experimental_config=everything, acc_events=True) as profiler:
        yield profiler
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
