"""The connection to a peer, and the loop over peers.

``Peer.news`` says that a connection is lost, from what ZeroMQ tells of it. ``WorkerPool`` and ``client.connection``
also give up a peer that breaks the protocol or does not answer in time.
"""

from __future__ import annotations

import enum
import os
import threading
import uuid
from collections.abc import Callable
from typing import Any

from tfstyle_dist.parameter_server.protocol import zeromq_sockets

MOST_FAILURES = 8
"""So many failed exchanges of keys in a row mean that the keys differ."""


class Wakeup:
    """A file that a thread polls together with its sockets, and that other threads wake it by.

    They may set it at any time, also while it is closed: a descriptor that was closed may already be another file's.

    Attributes:
        file: the descriptor to poll; readable while somebody has set it.
    """

    def __init__(self) -> None:
        self.file, self._end_to_write = os.pipe()
        os.set_blocking(self.file, False)
        self._lock = threading.Lock()
        self._is_set = False

    def set(self) -> None:
        """Wakes the thread; nothing once it is closed."""
        with self._lock:
            if not self._is_set:
                self._is_set = True
                os.write(self._end_to_write, b"\0")

    def clear(self) -> None:
        """Called by the thread that was woken, before it looks what there is to do."""
        os.read(self.file, 1)
        self._is_set = False  # whoever sets it after this wakes the thread again

    def close(self) -> None:
        """Called once, by the thread or after its end."""
        with self._lock:
            self._is_set = True  # for good
            os.close(self.file)
            os.close(self._end_to_write)


class News(enum.Enum):
    """What has become of the connection to a peer."""

    UP = enum.auto()
    """It stands: messages can be sent."""
    LOST = enum.auto()
    """It stood, and is gone: what was sent and not answered may or may not have arrived."""
    REFUSED = enum.auto()
    """The peer does not accept this process' key."""


class Peer:
    """A connection to one peer, and whether it stands.

    Args:
        context: sockets and keys.
        address: of the peer.
        kind: one letter that tells the peer's connections apart in its log.

    Attributes:
        socket: for messages.
        monitor: readable while there is news.
        up: whether the connection stands.
    """

    def __init__(self, context: zeromq_sockets.Context, address: str, kind: bytes) -> None:
        # A new identity each time: nothing that was meant for an earlier connection can come.
        self.socket: Any
        self.monitor: Any
        self.socket, self.monitor = context.connect(address, kind + uuid.uuid4().bytes)
        self.up = False
        self._failures = 0

    def news(self) -> News | None:
        """The next change of the connection; ``None``: there is none."""
        while (event := zeromq_sockets.next_event(self.monitor)) is not None:
            if event == "up":
                self._failures, self.up = 0, True
                return News.UP
            if event == "down" and self.up:
                self.up = False
                return News.LOST
            self._failures += 1  # it went away while keys were exchanged
            if event == "refused" or self._failures >= MOST_FAILURES:
                return News.REFUSED
        return None

    def close(self, linger_ms: int = 0) -> None:
        """Closes the connection; what was not sent yet is dropped.

        Args:
            linger_ms: so long the system goes on to send it.
        """
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


class PeerLoop:
    """Waits for what comes from peers, other sockets and other threads, and calls whoever takes it.

    All methods but ``wake`` are called by one thread.
    """

    def __init__(self) -> None:
        self._poller = zeromq_sockets.poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._wakeup = Wakeup()
        self.add(self._wakeup.file, self._wakeup.clear)

    def add(self, entry: Any, handler: Callable[[], None]) -> None:
        """Calls ``handler`` whenever a socket or file can be read from."""
        self._handlers[entry] = handler
        self._poller.register(entry, zeromq_sockets.POLLIN)

    def add_peer(self, peer: Peer, on_message: Callable[[], None], on_news: Callable[[], None]) -> None:
        """Calls ``on_news`` when the connection to a peer has changed and ``on_message`` when messages are there."""
        self.add(peer.socket, on_message)
        self.add(peer.monitor, on_news)

    def remove_peer(self, peer: Peer) -> None:
        """A connection that is about to be closed."""
        for entry in (peer.socket, peer.monitor):
            del self._handlers[entry]
            self._poller.unregister(entry)

    def turn(self, milliseconds: int) -> None:
        """Waits, at most so long, and takes what has come."""
        for entry, _ in self._poller.poll(milliseconds):
            handler = self._handlers.get(entry)
            if handler is not None:  # it was not removed by one of those before
                handler()

    def wake(self) -> None:
        """Ends the wait; any thread may call it, at any time."""
        self._wakeup.set()

    def close(self) -> None:
        """Called once, when the thread is at its end; peers are closed by whoever made them."""
        self._wakeup.close()
