"""Limits the memory that a parser may take."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOM = 1 << 30


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    """A parser that asks for memory without a limit gets ``MemoryError``, which no test allows."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
