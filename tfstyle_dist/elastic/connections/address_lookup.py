"""The address of a host by its name, and whether somebody listens there: asked without waiting for the answer."""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from typing import Any

_PROBE_SECONDS = 1.0

Address = tuple[str, int]
Found = tuple[Any, Any, int, str, Any]
"""An entry of ``socket.getaddrinfo``."""


class AddressLookup:
    """Asks anew for each use, since a host that was started again may have another address.

    Args:
        address: host and port.
    """

    def __init__(self, address: Address) -> None:
        self._host, self._port = address
        self._thread: threading.Thread | None = None
        self._found: list[Found] = []
        self._probe: socket.socket | None = None
        self._probed_life: Any = None
        self._probed_since = 0.0

    def refused(self, life: Any = None) -> bool:
        """Whether the host is there and nobody listens; asks anew if no question is under way.

        A host that has vanished does not answer at all, and whoever asks has more to do than to wait for it.

        Args:
            life: which process is asked about: what was answered of an earlier one says nothing of it.
        """
        if life != self._probed_life or time.monotonic() - self._probed_since > _PROBE_SECONDS:
            self._end_probe()
        if self._probe is None:
            if (found := self.found()) is None:
                return False
            self._probed_life, self._probed_since = life, time.monotonic()
            try:
                self._probe = socket.socket(found[0], found[1])
                self._probe.setblocking(False)
                answer = self._probe.connect_ex(found[4])
            except OSError as error:  # no address of this kind, or no file left
                answer = error.errno or errno.EINVAL
            if answer == errno.EINPROGRESS:
                return False
        else:
            poller = select.poll()
            poller.register(self._probe, select.POLLOUT)
            if not poller.poll(0):
                return False
            answer = self._probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self._end_probe()
        return answer == errno.ECONNREFUSED

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def __del__(self) -> None:
        self._end_probe()

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
