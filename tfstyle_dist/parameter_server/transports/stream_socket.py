"""Plain sockets, Unix or TCP: the client's end, messages in a stream of bytes, and the sockets' options."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from tfstyle_dist.core import unix_sockets
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.parameter_server.protocol.handshake import show_token
from tfstyle_dist.parameter_server.protocol.header import message_lengths

JOINED = 1 << 17
"""Parts of a message up to this size are sent together."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_PIECE = 1 << 17
_PIECE_BEFORE_TENSORS = 1 << 14
"""What comes with a message's head is copied once more."""
_CONNECT_SECONDS = 2.0
_END_SECONDS = 2.0
_MOST_ROOMS = 512
_Done = TypeVar("_Done", bytes, int)


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


class StreamSocket:
    """The client's end.

    Args:
        address: name of a Unix socket, or host and port.
        token: that the server gave.
        limit: how long to wait for the answer.

    Raises:
        OSError: nobody listens there, e.g. in another network namespace, or it is another user's.
    """

    def __init__(self, address: str | tuple[str, int], token: str, limit: timedelta | None) -> None:
        if isinstance(address, str):
            self._piece = _PIECE
            self._socket = unix_sockets.connect(address, _CONNECT_SECONDS)
        else:
            self._piece = _PIECE_BEFORE_TENSORS
            self._socket = socket.create_connection(address, _CONNECT_SECONDS)
            tune(self._socket)
        try:
            self._socket.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 1, 0))
            self._socket.sendall(show_token(token))
            self._frames = Frames()
            self.receive(limit, lambda: None)
        except BaseException:
            self._socket.close()
            raise
        self._end = select.poll()
        self._end.register(self._socket.fileno(), select.POLLIN)

    def has_ended(self) -> bool:
        """Whether the server is gone; asked when no answer is on its way."""
        return bool(self._end.poll(0))

    def send(self, parts: Sequence[Any], limit: timedelta | None, check: Callable[[], None]) -> None:
        """Sends a message.

        Args:
            parts: of it.
            limit: how long to wait while the server takes nothing.
            check: called about once a second meanwhile.

        Raises:
            ConnectionError: the server is gone.
            TimeoutError: it takes nothing; part of the message may be sent.
        """
        for part in [b"".join(parts)] if sum(map(len, parts)) <= JOINED else parts:
            left = memoryview(part)
            while left:
                left = left[self._when_ready(lambda: self._socket.send(left), limit, check) :]  # noqa: B023

    def receive(self, limit: timedelta | None, check: Callable[[], None]) -> list[bytes]:
        """The next message.

        Args:
            limit: how long to wait.
            check: called about once a second.

        Raises:
            ConnectionError: the server is gone.
            TimeoutError: nothing came in time.
        """
        while (message := self._frames.take()) is None:
            piece = self._when_ready(lambda: self._socket.recv(self._piece), limit, check)
            self._frames.feed(piece)
        return message

    def receive_into(self, rooms: Sequence[memoryview], limit: timedelta | None, check: Callable[[], None]) -> None:
        """The bytes of tensors, one after another; other arguments and errors as ``receive``."""
        left = []
        for room in rooms:
            rest = room[self._frames.take_into(room) :]
            if rest:
                left.append(rest)
        start = 0
        while start < len(left):
            count = self._when_ready(lambda: self._receive_all(left[start : start + _MOST_ROOMS]), limit, check)  # noqa: B023
            while count:
                taken = min(count, len(left[start]))
                left[start] = left[start][taken:]
                start, count = start + (not left[start]), count - taken

    def _receive_all(self, rooms: list[memoryview]) -> int:
        """Waits in the kernel until the rooms are full or the time of one wait is over."""
        return self._socket.recvmsg_into(rooms, 0, socket.MSG_WAITALL)[0]

    @staticmethod
    def _when_ready(call: Callable[[], _Done], limit: timedelta | None, check: Callable[[], None]) -> _Done:
        """What a call gives when it need not wait any more; other arguments and errors as ``receive``."""
        deadline: Deadline | None = None
        while True:
            try:
                done = call()
            except BlockingIOError:
                deadline = deadline or Deadline(limit)
                if deadline.passed():
                    raise TimeoutError from None
                check()
                continue
            except OSError as error:  # also that there is no way to its host any more
                raise ConnectionResetError(str(error)) from error
            if not done:
                raise ConnectionResetError
            return done

    def await_end(self) -> None:
        """Waits until the server has ended the connection, but not long; what still comes is dropped."""
        end = time.monotonic() + _END_SECONDS
        with contextlib.suppress(OSError):  # it is gone
            more = True
            while more and time.monotonic() < end:
                with contextlib.suppress(BlockingIOError):  # nothing came for a second
                    more = bool(self._socket.recv(JOINED))

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
