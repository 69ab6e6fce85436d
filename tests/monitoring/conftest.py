"""A clock that tests move by hand, so that times can be compared exactly."""

from __future__ import annotations

import threading

import pytest

from tfstyle_dist.runtime import clocks
from tfstyle_dist.shm import barrier


class HandClock:
    """Time that only ``advance`` moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Moves the time on; sums of powers of two stay exact."""
        with self._lock:
            self.now += seconds


@pytest.fixture
def time_by_hand(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    """Takes the place of the system's clock; ask for it before the strategy."""
    clock = HandClock()
    monkeypatch.setattr(clocks, "perf_counter", clock)
    monkeypatch.setattr(barrier, "perf_counter", clock)
    return clock
