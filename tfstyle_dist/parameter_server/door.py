"""Plain sockets between a server and its clients: messages as over ZeroMQ, with fewer threads to wake.

A client of the server's host comes through a Unix socket, for small messages: tensors are in shared memory. One of
another host comes over TCP if the cluster has no keys, and tensors travel there, too. A client is told place and token
over the link that it has already, so whoever may talk to the server may use the door. When it dies, the server sees it
at once.
"""

from __future__ import annotations

import select
import socket
import struct
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.parameter_server import wire

TOKEN_BYTES = 16
_PIECE = 1 << 18
_MOST_UNSENT = 64 << 20
_MOST_VISITORS = 4096
_JOINED = 1 << 17
_CONNECT_SECONDS = 2.0
_Received = TypeVar("_Received", bytes, int)


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
        carries: tensors come and go this way.
    """

    def __init__(self, connection: socket.socket, carries: bool) -> None:
        self.connection, self.frames, self.carries = connection, Frames(), carries
        self.client: Any = None  # once it has shown its token
        self._unsent: list[memoryview] = []
        self._broken = False

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

    def read_into(self, room: memoryview) -> int:
        """Takes bytes of a tensor; how many: 0 when none are there, -1 when the client is gone."""
        try:
            return self.frames.take_into(room) or self.connection.recv_into(room) or -1
        except BlockingIOError:
            return 0
        except OSError:
            return -1

    def send(self, parts: Sequence[Any]) -> bool:
        """Sends a message, or keeps what the client does not take yet; ``False``: it is gone or takes nothing.

        The parts may change afterwards.
        """
        left = [memoryview(part) for part in parts]
        if not self._unsent:
            joined = len(left) > 1 and sum(map(len, left)) <= _JOINED
            left = self._send_now([memoryview(b"".join(left))] if joined else left)
        self._unsent.extend(memoryview(bytes(view)) for view in left)
        return not self._broken and (self.carries or sum(map(len, self._unsent)) <= _MOST_UNSENT)

    def flush(self) -> bool:
        """Goes on sending; ``False``: the client is gone."""
        self._unsent = self._send_now(self._unsent)
        return not self._broken

    def _send_now(self, views: list[memoryview]) -> list[memoryview]:
        """Sends what the client takes; what is left."""
        for number, view in enumerate(views):
            while view:
                try:
                    view = view[self.connection.send(view) :]
                except BlockingIOError:
                    return [view, *views[number + 1 :]]
                except OSError:
                    self._broken = True
                    return []
        return []


class Door:
    """Where clients connect.

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
        self._tcp: socket.socket | None = None
        self._tokens: dict[bytes, Any] = {}
        self.visitors: dict[int, Visitor] = {}
        poller.register(self._listener.fileno(), flag)

        self._numbers = {self._listener.fileno(): self._listener}

    def is_entry(self, number: int) -> bool:
        """Whether new clients come at a file descriptor."""
        return number in self._numbers

    def port(self, host: str) -> int:
        """The TCP port for clients of other hosts; tensors travel there, too.

        Args:
            host: the interface to listen at.
        """
        if self._tcp is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._tcp = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            _tune(self._tcp)
            self._tcp.bind((host, 0))
            self._tcp.listen(128)
            self._tcp.setblocking(False)
            self._numbers[self._tcp.fileno()] = self._tcp
            self._poller.register(self._tcp.fileno(), self._flag)
        return int(self._tcp.getsockname()[1])

    def token(self, client: Any) -> str:
        """Lets a client in, once."""
        made = uuid.uuid4().bytes
        self._tokens[made] = client
        return made.hex()

    def admit(self, number: int) -> None:
        """Takes a new connection; who it is it has to tell."""
        try:
            connection, _ = self._numbers[number].accept()
        except OSError:
            return
        if len(self.visitors) >= _MOST_VISITORS:
            connection.close()
            return
        carries = self._numbers[number] is self._tcp
        if carries:
            _tune(connection)
        connection.setblocking(False)
        self.visitors[connection.fileno()] = Visitor(connection, carries)
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
        for number, listener in self._numbers.items():
            self._poller.unregister(number)
            listener.close()


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
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        else:
            self._socket = socket.create_connection(place, _CONNECT_SECONDS)
            self._socket.settimeout(None)
            _tune(self._socket)
        try:
            if isinstance(place, str):
                self._socket.connect("\0" + place)
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
        for part in [b"".join(parts)] if sum(map(len, parts)) <= _JOINED else parts:
            self._send(memoryview(part), limit)

    def _send(self, left: memoryview, limit: timedelta | None) -> None:
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
        while (message := self._frames.take()) is None:
            piece = self._when_there(lambda: self._socket.recv(_PIECE), limit, look)
            self._frames.feed(piece)
        return message

    def receive_into(self, room: memoryview, limit: timedelta | None, look: Callable[[], None]) -> None:
        """The bytes of a tensor; arguments and errors as ``receive``."""
        room = room[self._frames.take_into(room) :]
        while room:
            count = self._when_there(lambda left=room: self._socket.recv_into(left), limit, look)  # type: ignore[misc]
            room = room[count:]

    @staticmethod
    def _when_there(receive: Callable[[], _Received], limit: timedelta | None, look: Callable[[], None]) -> _Received:
        """What ``receive`` gives when something has come; arguments and errors as ``receive``."""
        deadline: Deadline | None = None
        while True:
            try:
                received = receive()
            except BlockingIOError:
                deadline = deadline or Deadline(limit)
                if deadline.passed():
                    raise TimeoutError from None
                look()
                continue
            if not received:
                raise ConnectionResetError
            return received

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()


def _tune(connection: socket.socket) -> None:
    """Buffers of 1 MB: two processes of one machine then change places less often."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
