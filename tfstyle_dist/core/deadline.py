"""One object for "until when": passed down through every wait, never bare seconds."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from tfstyle_dist.core.program_line import stack_from

_LOOK_SECONDS = 1.0  # a debugger is looked for that often, and four times within a shorter limit


class Deadline:
    """A point in time up to which a caller is willing to wait.

    A person who sits in a debugger stops the clock: once they have left it, at least three quarters of the limit are
    left, however long they sat there.

    Example:
        >>> deadline = Deadline(timedelta(seconds=10))
        >>> deadline.passed()
        False

    Args:
        limit: how long from now; ``None`` waits for ever.
    """

    __slots__ = ("_end", "_next_look", "limit")

    def __init__(self, limit: timedelta | None) -> None:
        self.limit = limit
        self._end: float | None = None
        self._next_look = 0.0
        self._start_again(time.monotonic())

    def remaining(self) -> float | None:
        """Seconds left, never below 0; ``None`` without a limit."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    def pause(self) -> float | None:
        """Seconds to sleep at most before ``passed`` is asked again; ``None`` without a limit."""
        return None if self._end is None else max(min(self._end, self._next_look) - time.monotonic(), 0.01)

    def passed(self) -> bool:
        """Whether the time is up. To be asked as often as ``pause`` says: only then is every debugger seen."""
        if self._end is None or (now := time.monotonic()) < min(self._end, self._next_look):
            return False
        if debugger_active():
            self._start_again(now)
            return False
        self._next_look = now + self._look_seconds()
        return now >= self._end

    def _start_again(self, now: float) -> None:
        if self.limit is not None:
            self._end = now + self.limit.total_seconds()
            self._next_look = now + self._look_seconds()

    def _look_seconds(self) -> float:
        return 0.0 if self.limit is None else min(self.limit.total_seconds() / 4, _LOOK_SECONDS)

    def __str__(self) -> str:
        return "no deadline" if self.limit is None else f"{self.limit.total_seconds():g} s"


def debugger_active() -> bool:
    """Whether some thread of this process sits at a pdb prompt."""
    codes = (one.f_code for frame in sys._current_frames().values() for one in stack_from(frame))
    return any(code.co_name in ("interaction", "_interaction") and "pdb" in code.co_filename for code in codes)
