"""A Unix socket between a server and a client of its host: messages as over ZeroMQ, with fewer threads to wake.

A client is told name and token over the link that it has already, so whoever may talk to the server may use the door.
Only small messages go this way: tensors are in shared memory. When a client dies, the server sees its end at once.
"""

from __future__ import annotations

import select
import socket
import struct
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.parameter_server import wire

TOKEN_BYTES = 16
_PIECE = 1 << 18
_MOST_UNSENT = 64 << 20


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, piece: bytes) -> None:
        """The next bytes."""
        self._data = self._data + piece if self._data else piece

    def take(self) -> list[bytes] | None:
        """The next whole message: header with meta part, and inline data if there are any.

        Raises:
            WireError: these bytes are no message.
        """
        lengths = wire.lengths(self._data)
        if lengths is None:
            return None
        head, data = lengths
        if len(self._data) < head + data:
            return None
        message = [self._data[:head], self._data[head : head + data]] if data else [self._data[:head]]
        self._data = self._data[head + data :]
        return message


class Visitor:
    """The server's end of one connection.

    Args:
        connection: non-blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.frames = connection, Frames()
        self.client: Any = None  # once it has shown its token
        self._unsent = b""

    @property
    def waits(self) -> bool:
        """Whether something is left to be sent."""
        return bool(self._unsent)

    def read(self) -> bool:
        """Takes the bytes that are there; ``False``: the client is gone."""
        try:
            piece = self.connection.recv(_PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.frames.feed(piece)
        return bool(piece)

    def send(self, parts: Sequence[Any]) -> bool:
        """Sends a message, or keeps what the client does not take yet; ``False``: it is gone or takes nothing."""
        self._unsent += b"".join(parts)
        return self.flush()

    def flush(self) -> bool:
        """Goes on sending."""
        try:
            sent = self.connection.send(self._unsent)
            self._unsent = self._unsent[sent:]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return len(self._unsent) <= _MOST_UNSENT


class Door:
    """Where clients of this host connect.

    Args:
        poller: told of every connection.
        flag: what the poller is to look for.
    """

    def __init__(self, poller: Any, flag: int) -> None:
        self._poller, self._flag = poller, flag
        self.name = f"tfstyle-ps-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind("\0" + self.name)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._tokens: dict[bytes, Any] = {}
        self.visitors: dict[int, Visitor] = {}
        poller.register(self._listener.fileno(), flag)

    @property
    def number(self) -> int:
        """The file descriptor where new clients come."""
        return self._listener.fileno()

    def token(self, client: Any) -> str:
        """Lets a client in, once."""
        made = uuid.uuid4().bytes
        self._tokens[made] = client
        return made.hex()

    def admit(self) -> None:
        """Takes a new connection; who it is it has to tell."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        self.visitors[connection.fileno()] = Visitor(connection)
        self._poller.register(connection.fileno(), self._flag)

    def identify(self, visitor: Visitor, message: bytes) -> bool:
        """Whether the first message of a connection is a token that was given out; answers it."""
        visitor.client = self._tokens.pop(bytes(message[wire.HEADER_SIZE :]), None)
        if visitor.client is None:
            return False
        visitor.client.visitor = visitor
        return visitor.send([wire.message(wire.Header(wire.Kind.OK, 0), b"")])

    def forget(self, client: Any) -> None:
        """A client is gone."""
        self._tokens = {token: other for token, other in self._tokens.items() if other is not client}

    def close(self, visitor: Visitor) -> None:
        """Ends a connection."""
        number = visitor.connection.fileno()
        if self.visitors.pop(number, None) is not None:
            self._poller.unregister(number)
            visitor.connection.close()

    def shut(self) -> None:
        """Ends all."""
        for visitor in list(self.visitors.values()):
            self.close(visitor)
        self._poller.unregister(self._listener.fileno())
        self._listener.close()


class Visit:
    """The client's end.

    Args:
        name: of the door.
        token: that the server gave.
        limit: how long to wait for the answer.

    Raises:
        OSError: there is no such door, e.g. in another network namespace, or it is another user's.
    """

    def __init__(self, name: str, token: str, limit: timedelta | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect("\0" + name)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 1, 0))
            token_bytes = bytes.fromhex(token)
            head = wire.Header(wire.Kind.HELLO, 0, meta_bytes=len(token_bytes))
            self._socket.sendall(wire.message(head, token_bytes))
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

    def send(self, parts: Sequence[Any], limit: timedelta | None) -> None:
        """Sends a message.

        Raises:
            ConnectionError: the server is gone.
            TimeoutError: it does not take the message in time.
        """
        left = memoryview(b"".join(parts))
        deadline: Deadline | None = None
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                deadline = deadline or Deadline(limit)
                if deadline.passed():
                    raise TimeoutError from None

    def receive(self, limit: timedelta | None, look: Callable[[], None]) -> list[bytes]:
        """The next message.

        Args:
            limit: how long to wait.
            look: called about once a second.

        Raises:
            ConnectionError: the server is gone.
            TimeoutError: nothing came in time.
        """
        deadline: Deadline | None = None
        while (message := self._frames.take()) is None:
            try:
                piece = self._socket.recv(_PIECE)
            except BlockingIOError:
                deadline = deadline or Deadline(limit)
                if deadline.passed():
                    raise TimeoutError from None
                look()
                continue
            if not piece:
                raise ConnectionResetError
            self._frames.feed(piece)
        return message

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
