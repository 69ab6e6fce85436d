"""Noticing that this process is about to be ended: SIGTERM, or a function of the user's that knows."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from tfstyle_dist.core.logging import get_logger

_POLL_SECONDS = 1.0
_by_signal: weakref.WeakSet[TerminationWatch] = weakref.WeakSet()
_previous: Any = None


class TerminationWatch:
    """Whether this process was told to end.

    Args:
        watcher_fn: asked once a second in a thread, tells by something true; default: SIGTERM tells.

    Attributes:
        fired_at: when, by ``time.monotonic``; ``None`` if it was not.

    Raises:
        ValueError: without a function, and not in the main thread, where Python takes signals.
    """

    def __init__(self, watcher_fn: Callable[[], Any] | None) -> None:
        self.fired_at: float | None = None
        self._error: Exception | None = None
        if watcher_fn is None:
            _install()
            _by_signal.add(self)
        else:
            threading.Thread(target=_poll, args=(weakref.ref(self), watcher_fn), name="preemption", daemon=True).start()

    @property
    def fired(self) -> bool:
        """Whether it was.

        Raises:
            RuntimeError: the function failed.
        """
        if self._error is not None:
            raise RuntimeError(
                f"termination_watcher_fn raised {self._error!r}, so nobody would notice a preemption. It must return "
                "something true or false."
            ) from self._error
        return self.fired_at is not None

    def fire(self) -> None:
        """It is told now."""
        if self.fired_at is None:
            self.fired_at = time.monotonic()

    def fail(self, error: Exception) -> None:
        """The function raised."""
        self._error = error

    def clear(self) -> None:
        """Waits for the next time."""
        self.fired_at = None


def _poll(watch: weakref.ref[TerminationWatch], watcher_fn: Callable[[], Any]) -> None:
    """Tells a watch when the function turns true, until the watch is gone."""
    before = False
    while True:
        target = watch()
        if target is None:
            return
        try:
            now = bool(watcher_fn())
        except Exception as error:
            target.fail(error)
            return
        if now and not before:
            target.fire()
        before = now
        del target
        time.sleep(_POLL_SECONDS)


def _install() -> None:
    global _previous
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        return
    try:
        _previous = signal.signal(signal.SIGTERM, _on_sigterm)
    except ValueError:
        raise ValueError(
            "SIGTERM can be watched from the main thread only. Build this in the main thread, or give a "
            "TerminationConfig with a termination_watcher_fn."
        ) from None


def _on_sigterm(number: int, frame: Any) -> None:
    watches = list(_by_signal)
    if watches:
        for watch in watches:
            watch.fire()
        get_logger().warning("SIGTERM: this process saves a checkpoint at the next step, with all other workers.")
        return
    # All who wanted to know are gone: what would have happened without them.
    signal.signal(signal.SIGTERM, _previous)
    os.kill(os.getpid(), signal.SIGTERM)
