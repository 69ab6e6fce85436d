"""On whose behalf a request is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """The scheduled function on whose behalf requests are made.

    Attributes:
        closure: its number; 0 outside of functions.
        attempt: how often it was started.
        low_water: all functions with smaller numbers are finished.
    """

    closure: int = 0
    attempt: int = 0
    low_water: int = 0


NO_WORK = Work()
