"""One connection to another worker: bytes in and out, without waiting.

Two workers of one host that can share memory send each other everything through it, so all that one has sent comes in
order, whatever it is. Their socket tells when a process has ended, and that there is something to be taken at once.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from tfstyle_dist.elastic.connections.doorbell import Bell
from tfstyle_dist.elastic.connections.packets import PREFIX, Packet, decode, encode, room_for
from tfstyle_dist.elastic.connections.ring_buffers import RingPair

_WAITED_FOR = ("data", "vote")
"""What the other worker's program waits for; all else is to be taken by its thread of the connections."""


class Connection:
    """A socket, what is still to be sent on it, and what has come of the next packet.

    Args:
        connected: the socket.
        rank: the worker that was dialled; ``None`` if it dialled, and is still to say who it is.

    Attributes:
        socket: the socket.
        rank: the worker at the other end, once it is known.
        accepted: whether the other end dialled.
        connecting: whether the dialling is under way.
        peer: what the other end said of itself.
        heard: when something came last.
        said: when something was sent last.
        meant: whether an end of it was meant, by either side.
        left: whether the other end has said that its process ends or does not want to take part any more.
        dropped: whether the other end has given this one up.
        doubtful_until: an end of it before then counts as meant by the other end.
        closed: whether it is closed.
        rings: memory that both ends share, once both have it.
        offered: memory that this end has made, and of which it does not know yet whether the other end has it.
        bell: that of the other end, if it can be rung.
        stopped: for how many seconds the other end's process was seen to be stopped by a signal.
    """

    def __init__(self, connected: socket.socket, rank: int | None) -> None:
        self.socket, self.rank = connected, rank
        self.accepted = rank is None
        self.connecting = not self.accepted
        self.peer: dict[str, Any] = {}
        self.heard = self.said = time.monotonic()
        self.meant = self.left = self.dropped = self.closed = False
        self.doubtful_until = self.stopped = 0.0
        self.rings: RingPair | None = None
        self.offered: RingPair | None = None
        self.bell: Bell | None = None
        self._lock = threading.Lock()
        self._out: deque[memoryview] = deque()
        self._prefix, self._header, self._body = bytearray(PREFIX.size), bytearray(), bytearray()
        self._target, self._have = self._prefix, 0
        connected.setblocking(False)
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def finish_connecting(self, hello: dict[str, Any]) -> bool:
        """The dialling has ended; says hello. Returns whether somebody is there."""
        self.connecting = False
        if self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or _is_itself(self.socket):
            return False
        if hello.get("host"):
            self.offered = RingPair.make()
        self.send(Packet({**hello, "lines": None if self.offered is None else self.offered.announced}))
        return True

    def origin(self) -> str:
        """The address of the other end."""
        try:
            host, port = self.socket.getpeername()[:2]
        except (OSError, ValueError):  # it is gone, or has none
            return "an unknown address"
        return f"{host}:{port}"

    def share(self, rings: RingPair | None, bell: Bell | None) -> None:
        """From now on everything goes through memory that both ends have, if there is any."""
        with self._lock:
            if self.offered is not None:
                self.offered.settle()
            self.rings, self.bell, self.offered = rings, bell, None

    # ---- out --------------------------------------------------------------------------------------------------

    def send(self, packet: Packet) -> None:
        """Sends as much as goes at once; of the rest a copy is kept, so that the tensors may be written to."""
        views = [view.cast("B") for view in encode(packet)]
        with self._lock:
            if self.closed:
                return
            if not self._out:
                views = self._push(views)
            self._out.extend(memoryview(bytes(view)) for view in views)
        kind = packet.header.get("is")
        if self.rings is not None and kind != "beat":
            self._tell(kind not in _WAITED_FOR)

    def flush(self) -> None:
        """Sends what was kept."""
        with self._lock:
            if not self._out:
                return
            self._out = deque(self._push(list(self._out)))
        if self.rings is not None:
            self._tell(False)

    def _tell(self, thread: bool) -> None:
        """There is something in shared memory.

        Args:
            thread: whether the other end's thread of the connections is to take it, if its program does not wait.
        """
        if self.bell is not None:
            self.bell.ring()
        if thread or self.bell is None:
            with contextlib.suppress(OSError):
                self.socket.send(b"!")

    def has_more(self) -> bool:
        """Whether something was kept."""
        return bool(self._out)

    def _push(self, views: list[memoryview]) -> list[memoryview]:
        if self.rings is not None:
            self.said = time.monotonic()
            return self.rings.there.write([view for view in views if view.nbytes])
        try:
            while views:
                count = self.socket.sendmsg(views[:64])
                self.said = time.monotonic()
                while views and count >= views[0].nbytes:
                    count -= views.pop(0).nbytes
                if count:
                    views[0] = views[0][count:]
        except BlockingIOError:
            pass
        except OSError:
            return []  # whoever reads from it finds out
        return views

    # ---- in ---------------------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Where memory is shared: the socket only says that there is something in it.

        Raises:
            EOFError: the other end closed it.
            OSError: it broke.
        """
        with contextlib.suppress(BlockingIOError):
            if not self.socket.recv(4096):
                raise EOFError("closed by the other end")

    def receive(self, most: int) -> Iterator[Packet]:
        """Reads what is there.

        Raises:
            EOFError: the other end closed it.
            OSError: it broke.
            DataLossError: what came is no packet.
        """
        while not self.closed:
            if self._have < len(self._target):
                room = memoryview(self._target)[self._have : self._have + most]
                count = self._read_into(room)
                if count is None:
                    return
                self._have += count
                self.heard = time.monotonic()
                if self._have < len(self._target):
                    continue
            yield from self._next_part()

    def _read_into(self, room: memoryview) -> int | None:
        """How many bytes came; ``None`` if none did."""
        if self.rings is not None:
            count = self.rings.back.read_into(room)
            if count and self.rings.back.was_asked_for_room():
                self._tell(False)
            return count or None
        try:
            count = self.socket.recv_into(room)
        except BlockingIOError:
            return None
        if count == 0:
            raise EOFError("closed by the other end")
        return count

    def _next_part(self) -> Iterator[Packet]:
        """A part is complete: the prefix, the header, or the body."""
        self._have = 0
        if self._target is self._prefix:
            self._header, self._body = room_for(self._prefix, stranger=self.rings is None and not self.peer)
            self._target = self._header
        elif self._target is self._header and self._body:
            self._target = self._body
        else:
            self._target = self._prefix
            yield decode(self._header, self._body)

    def close(self) -> None:
        """Closes the socket; who waits in it wakes."""
        with self._lock:
            self.closed = True
            self._out.clear()
            self.socket.close()
            if self.offered is not None:
                self.offered.settle()


def _is_itself(connected: socket.socket) -> bool:
    """Whether a socket was connected to itself, which the kernel allows for a port that nobody listens on."""
    try:
        return bool(connected.getsockname() == connected.getpeername())
    except OSError:
        return True
