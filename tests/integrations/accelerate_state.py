"""accelerate keeps its state in its classes: each test of a module that imports the fixture starts without any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from tfstyle_dist.integrations.accelerate import choice


@pytest.fixture(autouse=True)
def no_accelerate_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else accelerate warns that it chooses itself
    yield
    for state in (PartialState, AcceleratorState, GradientState):
        state._shared_state.clear()
    if choice._made is not None:
        choice._made.strategy.close()
        choice._made = None
