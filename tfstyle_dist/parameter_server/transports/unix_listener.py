"""A Unix socket for the clients of the server's host: their messages, whose tensors are in shared memory.

A client is told name and token over the connection that it has already, so whoever may talk to the server may use the
socket if it is of the same user; others go on by ZeroMQ. When it dies, the server sees it at once. Whoever has shown no
token is listened to for a token's length, and not for long.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from tfstyle_dist.core import unix_sockets
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.core.strangers import Strangers
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.protocol.handshake import TOKEN_BYTES, TOKEN_SECONDS, WELCOME
from tfstyle_dist.parameter_server.protocol.header import ProtocolError
from tfstyle_dist.parameter_server.protocol.operations import Answer, padded
from tfstyle_dist.parameter_server.transports.client_session import ClientSession
from tfstyle_dist.parameter_server.transports.listening_socket import ListeningSocket
from tfstyle_dist.parameter_server.transports.stream_socket import JOINED, Frames
from tfstyle_dist.parameter_server.transports.transport import Host

_PIECE = 1 << 18
_MOST_UNSENT = 64 << 20


class UnixConnection:
    """The server's end of one connection.

    Args:
        connection: non-blocking.
        listener: where it came in.
    """

    batches_only, is_trusted = False, True

    def __init__(self, connection: socket.socket, listener: UnixListener) -> None:
        self.connection, self.frames, self._listener = connection, Frames(), listener
        self.client: ClientSession | None = None  # once it has shown its token
        self._room = TOKEN_BYTES  # until then
        self._unsent: list[memoryview] = []
        self._broken = False

    @property
    def waits(self) -> bool:
        """Whether something is left to be sent."""
        return bool(self._unsent)

    def end(self) -> None:
        """Ends the connection."""
        self._listener.end(self)

    def detach(self) -> None:
        """Its end is not the client's any more."""
        self.client = None

    def read(self) -> bool:
        """Takes the bytes that are there; ``False``: the client is gone."""
        try:
            piece = self.connection.recv(self._room if self.client is None else _PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._room = max(self._room - len(piece), 0)
        self.frames.feed(piece)
        return bool(piece)

    def send(self, parts: Sequence[Any]) -> bool:
        """Sends a message, or keeps what the client does not take yet; ``False``: it is gone or takes nothing.

        The parts may change afterwards.
        """
        left = [memoryview(part) for part in parts]
        if not self._unsent:
            joined = len(left) > 1 and sum(map(len, left)) <= JOINED
            left = self._send_now([memoryview(b"".join(left))] if joined else left)
        self._unsent.extend(memoryview(bytes(view)) for view in left)
        return not self._broken and sum(map(len, self._unsent)) <= _MOST_UNSENT

    def stream(self, head: bytes, answer: Answer) -> bool:
        """Tensors do not go this way."""
        total = sum(padded(t.nbytes) for t in answer.tensors)
        raise InvalidArgumentError(f"an answer of {total} bytes does not fit into the shared memory of this client")

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


class UnixListener:
    """Where the clients of this host connect.

    Args:
        host: the server.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.name = unix_sockets.new_name("ps")
        self._listening = ListeningSocket(unix_sockets.listen(self.name, 128), host.name)
        self.number = self._listening.number
        self.connections: dict[int, UnixConnection] = {}
        self._strangers = Strangers[UnixConnection](TOKEN_SECONDS)
        host.poller.register(self.number, zeromq_sockets.POLLIN)

    def invite(self, client: ClientSession) -> dict[str, Any]:
        """The name of the socket, and a token."""
        return {"token": self._host.tokens.give(client), "name": self.name}

    def admit(self) -> None:
        """Takes a new connection of this user; who it is it has to tell."""
        connection = self._listening.accept(len(self.connections))
        if connection is None:
            return
        if not unix_sockets.is_same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        admitted = self.connections[connection.fileno()] = UnixConnection(connection, self)
        self._strangers.admit(admitted)
        self._host.poller.register(connection.fileno(), zeromq_sockets.POLLIN)

    def serve(self, number: int, event: int) -> None:
        """Takes the messages of a client, and sends what waits for it."""
        connection = self.connections.get(number)
        if connection is None:
            return
        here = (not event & zeromq_sockets.POLLOUT or connection.flush()) and connection.read()
        try:
            while here and (parts := connection.frames.take()) is not None:
                if connection.client is None:
                    here = self._identify(connection, parts[0])
                elif not connection.client.refused:
                    self._host.take_message(connection.client, parts, connection)
                here = here and self.connections.get(number) is connection
        except ProtocolError as error:
            get_logger().warning("%s closes a connection: %s", self._host.name, error)
            here = False
        if not here:
            self.end(connection)
            if connection.client is not None:
                self._host.forget(connection.client)
        elif connection.waits or event & zeromq_sockets.POLLOUT:
            flags = zeromq_sockets.POLLIN | (zeromq_sockets.POLLOUT if connection.waits else 0)
            self._host.poller.modify(number, flags)

    def _identify(self, connection: UnixConnection, message: bytes) -> bool:
        """Whether the first message of a connection is a token that was given out; answers it."""
        client = self._host.tokens.take(message)
        if client is None:
            return False
        connection.client, client.connection = client, connection
        self._strangers.forget(connection)
        return connection.send([WELCOME])

    def tick(self) -> None:
        """Ends the connections that have not shown a token in time."""
        for connection in self._strangers.late():
            self.end(connection)

    def end(self, connection: UnixConnection) -> None:
        """Ends a connection."""
        self._strangers.forget(connection)
        number = connection.connection.fileno()
        if self.connections.pop(number, None) is not None:
            self._host.poller.unregister(number)
            connection.connection.close()

    def close(self) -> None:
        """Ends all."""
        for connection in list(self.connections.values()):
            self.end(connection)
        self._host.poller.unregister(self.number)
        self._listening.close()
