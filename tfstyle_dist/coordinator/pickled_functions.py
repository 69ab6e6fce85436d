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
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy

_State = tuple[int, tuple[Any, ...]]
_MOST_MODES = 8
"""So many combinations of modes of modules are kept in mind for a function."""


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
        self._by_function: weakref.WeakKeyDictionary[Any, dict[_State, int]] = weakref.WeakKeyDictionary()
        self._by_content: dict[tuple[int, bytes], int] = {}

    def number(self, fn: Callable[..., Any]) -> int:
        """Under which the workers know a function."""
        store = self._strategy.remote_store
        # Parameters were frozen or added, or model.eval() was called: the workers are to learn of it.
        state = store.retold, tuple(store.modules.of_each("training"))
        try:
            known = self._by_function.get(fn, {})
        except TypeError:
            known = {}
        if state in known:
            return known[state]
        with self._lock:
            parts = [bytes(p) for p in pickling.dumps(fn, self._outgoing)]
            state = store.retold, state[1]
            digest = hashlib.sha256(b"".join(parts)).digest()
            number = self._by_content.setdefault((store.retold, digest), len(self._by_content) + 1)
            self.parts.setdefault(number, parts)
            # A program switches between training and evaluation: what was pickled before is found again.
            kept = {old: n for old, n in known.items() if old[0] == store.retold}
            with contextlib.suppress(TypeError):  # what cannot be referred to weakly is pickled each time
                self._by_function[fn] = {**dict(list(kept.items())[-_MOST_MODES:]), state: number}
        return number
