"""Waiting for what other threads and processes do."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Returns as soon as ``condition()`` is true; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {seconds:g} s"
        time.sleep(0.01)


def wait_until_gone(reference: weakref.ref[Any]) -> None:
    """Collects garbage until an object is gone: the thread of a replica may hold what it ran a moment longer."""

    def is_gone() -> bool:
        gc.collect()
        return reference() is None

    wait_until(is_gone)
