"""On whose behalf a request is made, and how its tensors are to travel."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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


@dataclass(frozen=True, slots=True)
class WireOptions:
    """How tensors travel between hosts.

    Attributes:
        dtype: of float32 parameters and their gradients on the way; ``None``: their own.
        ahead: ask for the parameters of the next function while this one computes.
    """

    dtype: torch.dtype | None = None
    ahead: bool = False
