"""Random numbers of Python's ``random`` and of numpy in an elastic job: sent, and watched where they are not exact."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.runtime.random_streams import python_state


def described(state: Any) -> list[Any]:
    """A state of ``random`` and numpy as numbers and text."""
    python, numpy = state
    return [list(python), _described(numpy)]


def state_of(description: list[Any]) -> Any:
    """The state that ``described`` described."""
    (version, numbers, gauss), numpy = description
    return (version, tuple(numbers), gauss), _state_of(numpy)


def _described(part: Any) -> Any:
    if isinstance(part, tuple):
        return {"parts": [_described(entry) for entry in part]}
    if isinstance(part, dict):
        return {name: _described(entry) for name, entry in part.items()}
    return [part.dtype.str, part.tolist()] if isinstance(part, np.ndarray) else part


def _state_of(part: Any) -> Any:
    if isinstance(part, dict):
        entries = {name: _state_of(entry) for name, entry in part.items() if name != "parts"}
        return entries or tuple(map(_state_of, part["parts"]))
    return np.array(part[1], part[0]) if isinstance(part, list) else part


class Watch:
    """Says once that a step draws numbers that are not exact; looks at steps 1, 2, 4, 8, ... because that takes time.

    Args:
        steps: that were made before.
    """

    def __init__(self, steps: int) -> None:
        self._before = python_state() if steps & (steps + 1) == 0 else None

    def end(self) -> None:
        """The step is made."""
        if self._before is not None and described(self._before) != described(python_state()):
            warn_once(
                "elastic python numbers",
                "A step drew random numbers from Python's `random` or numpy's global stream. The replicas of a worker "
                "draw from one such stream, so what they get depends on who holds which replica, and a step that is "
                "done again draws others: the weights are not those of an undisturbed run. Draw with torch, or call "
                "strategy.seed_replicas(seed, python=True) before the first strategy.run.",
            )
