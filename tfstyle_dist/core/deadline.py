"""One object for "until when": passed down through every wait, never bare seconds."""

from __future__ import annotations

import sys
import time
from datetime import timedelta


class Deadline:
    """A point in time up to which a caller is willing to wait.

    Example:
        >>> deadline = Deadline(timedelta(seconds=10))
        >>> deadline.passed()
        False

    Args:
        limit: how long from now; ``None`` waits for ever.
    """

    __slots__ = ("_end", "limit")

    def __init__(self, limit: timedelta | None) -> None:
        self.limit = limit
        self._end = None if limit is None else time.monotonic() + limit.total_seconds()

    def remaining(self) -> float | None:
        """Seconds left, never below 0; ``None`` without a limit."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    def passed(self) -> bool:
        """Whether the time is up. A person who sits in a debugger stops the clock."""
        if self._end is None or time.monotonic() < self._end:
            return False
        if debugger_active():
            assert self.limit is not None
            self._end = time.monotonic() + self.limit.total_seconds()
            return False
        return True

    def __str__(self) -> str:
        return "no deadline" if self.limit is None else f"{self.limit.total_seconds():g} s"


def debugger_active() -> bool:
    """Whether some thread of this process sits at a pdb prompt."""
    for frame in sys._current_frames().values():
        current = frame
        while current is not None:
            if current.f_code.co_name in ("interaction", "_interaction") and "pdb" in current.f_code.co_filename:
                return True
            current = current.f_back  # type: ignore[assignment]
    return False
