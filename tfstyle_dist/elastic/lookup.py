"""The address of a host by its name, asked for without waiting: a name server may take its time."""

from __future__ import annotations

import socket
import threading
from typing import Any

Address = tuple[str, int]
Found = tuple[Any, Any, int, str, Any]
"""An entry of ``socket.getaddrinfo``."""


class Lookup:
    """Asks anew for each use, since a host that was started again may have another address.

    Args:
        address: host and port.
    """

    def __init__(self, address: Address) -> None:
        self._host, self._port = address
        self._thread: threading.Thread | None = None
        self._found: list[Found] = []

    def found(self) -> Found | None:
        """What the last question found, once; asks again if there is nothing and nobody asks."""
        try:
            return socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            )[0]
        except socket.gaierror:
            pass  # a name
        if self._thread is not None and self._thread.is_alive():
            return None
        found, self._found = self._found, []
        if found:
            self._thread = None
            return found[0]
        self._thread = threading.Thread(target=self._ask, name="tfstyle-elastic-lookup", daemon=True)
        self._thread.start()
        return None

    def _ask(self) -> None:
        try:
            self._found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[:1]
        except OSError:
            self._found = []
