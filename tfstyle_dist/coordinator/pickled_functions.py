"""The functions that a coordinator has scheduled, pickled, and by what they are known again."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

from tfstyle_dist.coordinator.references import Outgoing
from tfstyle_dist.parameter_server.protocol import pickling
from tfstyle_dist.strategies.parameter_server import ParameterServerStrategy


class PickledFunctions:
    """Pickles a function when it is scheduled for the first time, and again when it would be another one.

    Args:
        strategy: the coordinator's.
        outgoing: makes the references in it.
        lock: held while it is pickled.

    Attributes:
        parts: by number.
    """

    def __init__(self, strategy: ParameterServerStrategy, outgoing: Outgoing, lock: threading.RLock) -> None:
        self._strategy, self._outgoing, self._lock = strategy, outgoing, lock
        self.parts: dict[int, list[bytes]] = {}
        self._by_function: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._by_content: dict[tuple[int, bytes], int] = {}

    def number(self, fn: Callable[..., Any]) -> int:
        """Under which the workers know a function."""
        told = self._strategy.remote_store.retold  # parameters were frozen or added: the workers are to learn of it
        try:
            number, pickled_at = self._by_function.get(fn, (0, -1))
        except TypeError:
            pickled_at = -1
        if pickled_at == told:
            return number
        with self._lock:
            parts = [bytes(p) for p in pickling.dumps(fn, self._outgoing)]
            told = self._strategy.remote_store.retold
            digest = hashlib.sha256(b"".join(parts)).digest()
            number = self._by_content.setdefault((told, digest), len(self._by_content) + 1)
            self.parts.setdefault(number, parts)
            with contextlib.suppress(TypeError):  # what cannot be referred to weakly is pickled each time
                self._by_function[fn] = number, told
        return number
