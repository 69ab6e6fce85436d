"""Ctrl-C, and other signals that raise, wait while the turn passes from one replica to the next.

A signal's handler may raise between any two instructions of the main thread. Raised while objects are exchanged, it
would leave some with one replica's content and some with another's. So signals are held back there, and admitted where
the user's code runs and where a replica waits. A handler of the program's own that writes something down, such as that
training shall stop, would write it to another replica's content while that one has the turn: it waits for the first
replica's turn, or until the signal comes again. Ctrl-C, and the alarm of a limit of time, do not.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import sys
import threading
from types import FrameType
from typing import Any

_THAT_RAISE = [
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]


# The functions of ``signal`` make enums of numbers and handlers, which takes longer than a turn.
_handler_of, _set_handler = _signal.getsignal, _signal.signal
_CTRL_C, _ALARM = signal.default_int_handler, getattr(signal, "SIGALRM", None)


class Interrupts:
    """What a thread that gets no signals has: nothing to hold back."""

    def begin(self, run: object) -> None:
        """A run begins; signals are held back from now on."""

    def end(self, run: object) -> None:
        """The run is over, or could not begin; what was held back is handled now, as everything after it."""

    def hold(self) -> None:
        """Signals are held back from now on."""

    def admit(self, waits: bool = False) -> None:
        """Signals are handled as they come, and those that were held back now: may raise.

        Args:
            waits: the replica waits for its turn: only signals that end the wait.
        """


class _MainThread(Interrupts):
    def __init__(self) -> None:
        self._usual: dict[int, Any] = {}
        self._runs: set[object] = set()  # one may be made inside another
        self._held = self._waits = False
        self._waiting: list[int] = []
        self._own = self._handle

    def begin(self, run: object) -> None:
        self._held = True
        self._runs.add(run)
        if len(self._runs) == 1:
            for number in _THAT_RAISE:
                handler = _handler_of(number)
                if callable(handler) and handler is not self._own:
                    self._usual[number] = handler
                    _set_handler(number, self._own)

    def end(self, run: object) -> None:
        self._runs.discard(run)
        try:
            for number, handler in () if self._runs else self._usual.items():
                if _handler_of(number) is self._own:  # else somebody set another one meanwhile, a debugger say
                    _set_handler(number, handler)
        finally:
            self.admit()

    def hold(self) -> None:
        self._held = True

    def admit(self, waits: bool = False) -> None:
        self._held, self._waits = False, waits
        for _ in range(len(self._waiting)):
            self._handle(self._waiting.pop(0), sys._getframe(1))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        notes = number != _ALARM and self._usual[number] is not _CTRL_C
        if self._held or (self._waits and notes and number not in self._waiting):
            self._waiting.append(number)
        else:
            self._usual[number](number, frame)


NONE = Interrupts()
_main = _MainThread()


def of_this_thread() -> Interrupts:
    """The signals that the current thread gets: Python gives them to the main thread alone."""
    return _main if threading.current_thread() is threading.main_thread() else NONE
