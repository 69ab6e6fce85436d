"""Waking a thread that polls sockets."""

from __future__ import annotations

import os
import threading


class Bell:
    """A file that a thread polls together with its sockets, and that other threads wake it by.

    They may ring at any time, also while it is closed: a descriptor that was closed may already be another file's.

    Attributes:
        file: the descriptor to poll; readable while somebody has rung.
    """

    def __init__(self) -> None:
        self.file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._rung = False

    def ring(self) -> None:
        """Wakes the thread; nothing once the bell is closed."""
        with self._lock:
            if not self._rung:
                self._rung = True
                os.eventfd_write(self.file, 1)

    def heard(self) -> None:
        """Called by the thread that was woken, before it looks what there is to do."""
        os.eventfd_read(self.file)
        self._rung = False  # whoever rings after this wakes it again

    def close(self) -> None:
        """Called once, by the thread or after its end."""
        with self._lock:
            self._rung = True  # for good
            os.close(self.file)
