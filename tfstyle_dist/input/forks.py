"""What processes that a loader starts must leave alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_left_alone() -> Iterator[None]:
    """Processes that are forked inside do not collect what is garbage by now.

    Events, streams and memory of a GPU can be freed by no other process than the one that made them: a fork that does
    so is aborted. In a program that has frozen its objects itself nothing is done.
    """
    frozen = gc.get_freeze_count() == 0
    if frozen:
        gc.freeze()
    try:
        yield
    finally:
        if frozen:
            gc.unfreeze()
