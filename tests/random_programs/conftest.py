"""What all random programs need."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """One thread for each replica, and no messages about what odd programs do."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
