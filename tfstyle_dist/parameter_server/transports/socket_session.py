"""The client's end of a plain socket to a server: a Unix socket on its host, or TCP."""

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
from tfstyle_dist.parameter_server.protocol.header import Header, Kind, pack_message
from tfstyle_dist.parameter_server.transports.frames import JOINED, Frames, tune

_PIECE = 1 << 17
_PIECE_BEFORE_TENSORS = 1 << 14
"""What comes with a message's head is copied once more."""
_CONNECT_SECONDS = 2.0
_END_SECONDS = 2.0
_MOST_ROOMS = 512
_Done = TypeVar("_Done", bytes, int)


class Visit:
    """The client's end.

    Args:
        place: name of the door, or host and port.
        token: that the server gave.
        limit: how long to wait for the answer.

    Raises:
        OSError: there is no such door, e.g. in another network namespace, or it is another user's.
    """

    def __init__(self, place: str | tuple[str, int], token: str, limit: timedelta | None) -> None:
        if isinstance(place, str):
            self._piece = _PIECE
            self._socket = unix_sockets.connect(place, _CONNECT_SECONDS)
        else:
            self._piece = _PIECE_BEFORE_TENSORS
            self._socket = socket.create_connection(place, _CONNECT_SECONDS)
            tune(self._socket)
        try:
            self._socket.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 1, 0))
            token_bytes = bytes.fromhex(token)
            head = Header(Kind.HELLO, 0, meta_bytes=len(token_bytes))
            self._socket.sendall(pack_message(head, token_bytes))
            self._frames = Frames()
            self.receive(limit, lambda: None)
        except BaseException:
            self._socket.close()
            raise
        self._end = select.poll()
        self._end.register(self._socket.fileno(), select.POLLIN)

    def ended(self) -> bool:
        """Whether the server is gone; asked when no answer is on its way."""
        return bool(self._end.poll(0))

    def send(self, parts: Sequence[Any], limit: timedelta | None, look: Callable[[], None]) -> None:
        """Sends a message.

        Args:
            parts: of it.
            limit: how long to wait while the server takes nothing.
            look: called about once a second meanwhile.

        Raises:
            ConnectionError: the server is gone.
            TimeoutError: it takes nothing; part of the message may be sent.
        """
        for part in [b"".join(parts)] if sum(map(len, parts)) <= JOINED else parts:
            left = memoryview(part)
            while left:
                left = left[self._when_ready(lambda: self._socket.send(left), limit, look) :]  # noqa: B023

    def receive(self, limit: timedelta | None, look: Callable[[], None]) -> list[bytes]:
        """The next message.

        Args:
            limit: how long to wait.
            look: called about once a second.

        Raises:
            ConnectionError: the server is gone.
            TimeoutError: nothing came in time.
        """
        while (message := self._frames.take()) is None:
            piece = self._when_ready(lambda: self._socket.recv(self._piece), limit, look)
            self._frames.feed(piece)
        return message

    def receive_into(self, rooms: Sequence[memoryview], limit: timedelta | None, look: Callable[[], None]) -> None:
        """The bytes of tensors, one after another; other arguments and errors as ``receive``."""
        left = []
        for room in rooms:
            rest = room[self._frames.take_into(room) :]
            if rest:
                left.append(rest)
        start = 0
        while start < len(left):
            count = self._when_ready(lambda: self._receive_all(left[start : start + _MOST_ROOMS]), limit, look)  # noqa: B023
            while count:
                taken = min(count, len(left[start]))
                left[start] = left[start][taken:]
                start, count = start + (not left[start]), count - taken

    def _receive_all(self, rooms: list[memoryview]) -> int:
        """Waits in the kernel until the rooms are full or the time of one wait is over."""
        return self._socket.recvmsg_into(rooms, 0, socket.MSG_WAITALL)[0]

    @staticmethod
    def _when_ready(call: Callable[[], _Done], limit: timedelta | None, look: Callable[[], None]) -> _Done:
        """What a call gives when it need not wait any more; other arguments and errors as ``receive``."""
        deadline: Deadline | None = None
        while True:
            try:
                done = call()
            except BlockingIOError:
                deadline = deadline or Deadline(limit)
                if deadline.passed():
                    raise TimeoutError from None
                look()
                continue
            if not done:
                raise ConnectionResetError
            return done

    def await_end(self) -> None:
        """Waits until the server has ended the connection, but not long; what still comes is dropped."""
        end = time.monotonic() + _END_SECONDS
        with contextlib.suppress(OSError):  # nothing came for a second, or it is gone
            while self._socket.recv(JOINED) and time.monotonic() < end:
                pass

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
