"""A Unix socket for the clients of the server's host: small messages, with fewer threads to wake than ZeroMQ.

Tensors are in shared memory. A client is told place and token over the link that it has already, so whoever may talk to
the server may use the door if it is of the same user; others go on by ZeroMQ. When it dies, the server sees it at once.
Whoever has not shown a token is listened to for a token's length, and not for long.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

from tfstyle_dist.core import unix_sockets
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.parameter_server.protocol.header import HEADER_SIZE, Header, Kind, pack_message
from tfstyle_dist.parameter_server.protocol.operations import padded
from tfstyle_dist.parameter_server.server.table import Answer
from tfstyle_dist.parameter_server.transports.frames import JOINED, Frames
from tfstyle_dist.parameter_server.transports.listening_socket import Listener

_PIECE = 1 << 18
_MOST_UNSENT = 64 << 20
_TOKEN = 16
TOKEN_BYTES = HEADER_SIZE + _TOKEN
"""Of the message with a token: more is not taken from a stranger."""
TOKEN_SECONDS = 10.0
"""So long it may take."""


class Tokens:
    """Who may come through a plain socket: a client that was told a token over its first link."""

    def __init__(self) -> None:
        self._clients: dict[bytes, Any] = {}

    def give(self, client: Any) -> str:
        """Lets a client in, once."""
        made = secrets.token_bytes(_TOKEN)
        self._clients[made] = client
        return made.hex()

    def take(self, message: bytes) -> Any:
        """The client whose token is in the first message of a connection; ``None``: there is none."""
        return self._clients.pop(bytes(message[HEADER_SIZE:]), None)

    def forget(self, client: Any) -> None:
        """A client is gone."""
        self._clients = {token: other for token, other in self._clients.items() if other is not client}


WELCOME = pack_message(Header(Kind.OK, 0), b"")
"""The answer to a token."""


class Visitor:
    """The server's end of one connection.

    Args:
        connection: non-blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.frames = connection, Frames()
        self.client: Any = None  # once it has shown its token
        self._room = TOKEN_BYTES  # until then
        self._unsent: list[memoryview] = []
        self._broken = False

    @property
    def waits(self) -> bool:
        """Whether something is left to be sent."""
        return bool(self._unsent)

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


class Door:
    """Where the clients of this host connect.

    Args:
        poller: told of every connection.
        flag: what the poller is to look for.
        tokens: of those who may come in.
        server: its name, for messages.
    """

    def __init__(self, poller: Any, flag: int, tokens: Tokens, server: str) -> None:
        self._poller, self._flag, self._tokens = poller, flag, tokens
        self.name = unix_sockets.new_name("ps")
        self._listener = Listener(unix_sockets.listen(self.name, 128), server)
        self.number = self._listener.number
        self.visitors: dict[int, Visitor] = {}
        self._strangers: dict[Visitor, float] = {}  # until when they have time; the first one has the least
        poller.register(self.number, flag)

    def admit(self) -> None:
        """Takes a new connection of this user; who it is it has to tell."""
        connection = self._listener.accept(len(self.visitors))
        if connection is None:
            return
        if not unix_sockets.is_same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        visitor = self.visitors[connection.fileno()] = Visitor(connection)
        self._strangers[visitor] = time.monotonic() + TOKEN_SECONDS
        self._poller.register(connection.fileno(), self._flag)

    def identify(self, visitor: Visitor, message: bytes) -> bool:
        """Whether the first message of a connection is a token that was given out; answers it."""
        client = self._tokens.take(message)
        if client is None or client.has_entered:
            return False
        visitor.client, client.visitor = client, visitor
        self._strangers.pop(visitor, None)
        return visitor.send([WELCOME])

    def send_strangers_away(self) -> None:
        """Ends the connections that have not shown a token in time."""
        for visitor, until in list(self._strangers.items()):
            if until > time.monotonic():
                return
            self.close(visitor)

    def close(self, visitor: Visitor) -> None:
        """Ends a connection."""
        self._strangers.pop(visitor, None)
        number = visitor.connection.fileno()
        if self.visitors.pop(number, None) is not None:
            self._poller.unregister(number)
            visitor.connection.close()

    def shut(self) -> None:
        """Ends all."""
        for visitor in list(self.visitors.values()):
            self.close(visitor)
        self._poller.unregister(self.number)
        self._listener.close()
