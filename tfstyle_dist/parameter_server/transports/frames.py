"""Messages in a stream of bytes, and the options of the sockets that carry it."""

from __future__ import annotations

import socket

from tfstyle_dist.parameter_server.protocol.header import message_lengths

JOINED = 1 << 17
"""Parts of a message up to this size are sent together."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = b""

    def take_into(self, room: memoryview) -> int:
        """Moves bytes that belong to no message into a buffer; how many."""
        count = min(len(room), len(self._data))
        if count:
            room[:count] = self._data[:count]
            self._data = self._data[count:]
        return count

    def feed(self, piece: bytes) -> None:
        """The next bytes."""
        self._data = self._data + piece if self._data else piece

    def take(self) -> list[bytes] | None:
        """The next whole message: header with meta part, and inline data if there are any.

        Raises:
            ProtocolError: these bytes are no message.
        """
        lengths = message_lengths(self._data)
        if lengths is None:
            return None
        head, data = lengths
        if len(self._data) < head + data:
            return None
        message = [self._data[:head], self._data[head : head + data]] if data else [self._data[:head]]
        self._data = self._data[head + data :]
        return message


def tune(connection: socket.socket) -> None:
    """For tensors over TCP: no delay, large buffers, and a host that vanished is noticed after half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, buffer, 1 << 20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
