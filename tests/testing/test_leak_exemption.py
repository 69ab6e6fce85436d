"""Threads that serve the sums of the whole process are no leak of the test in which they begin."""

from __future__ import annotations

import pytest
import torch

from tfstyle_dist.ops import aggregate
from tfstyle_dist_kernels import cpu_sum, cpu_threads


@pytest.mark.usefixtures("no_leaks")
def test_helper_threads_may_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sum, "SHARED_ABOVE_BYTES", 0)
    torch.set_num_threads(len(cpu_threads._inboxes) + 2)
    before = len(cpu_threads._inboxes)
    aggregate([torch.ones(1 << 20)] * 3, backend="numba")
    assert len(cpu_threads._inboxes) == before + 1
