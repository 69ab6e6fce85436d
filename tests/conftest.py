"""Fixtures for every test: each starts from, and must leave, the same state of torch and of the package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tfstyle_dist.runtime import context


@pytest.fixture(autouse=True)
def _restore_torch_state() -> Iterator[None]:
    """Seeds torch, and puts back what a test may have changed in it."""
    rng_state = torch.get_rng_state()
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    num_threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(rng_state)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def _no_leaked_strategy() -> Iterator[None]:
    """Fails a test that leaves a strategy scope or ``experimental_set_strategy`` behind."""
    yield
    leaked = []
    while (frame := context.current_frame()) is not None:
        leaked.append(type(frame.strategy).__name__)
        context.pop(frame)
        context.set_global_strategy(None)
    if leaked:
        pytest.fail(f"The test left {leaked} as the current strategy; leave its scope, or set None.")
