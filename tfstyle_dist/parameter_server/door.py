"""A Unix socket for the clients of the server's host: small messages, with fewer threads to wake than ZeroMQ.

Tensors are in shared memory. A client is told place and token over the link that it has already, so whoever may talk to
the server may use the door. When it dies, the server sees it at once.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Sequence
from typing import Any

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.parameter_server import wire
from tfstyle_dist.parameter_server.frames import JOINED, Frames
from tfstyle_dist.parameter_server.listener import Listener
from tfstyle_dist.parameter_server.table import Answer

_PIECE = 1 << 18
_MOST_UNSENT = 64 << 20


class Tokens:
    """Who may come through a plain socket: a client that was told a token over its first link."""

    def __init__(self) -> None:
        self._clients: dict[bytes, Any] = {}

    def give(self, client: Any) -> str:
        """Lets a client in, once."""
        made = uuid.uuid4().bytes
        self._clients[made] = client
        return made.hex()

    def take(self, message: bytes) -> Any:
        """The client whose token is in the first message of a connection; ``None``: there is none."""
        return self._clients.pop(bytes(message[wire.HEADER_SIZE :]), None)

    def forget(self, client: Any) -> None:
        """A client is gone."""
        self._clients = {token: other for token, other in self._clients.items() if other is not client}


WELCOME = wire.message(wire.Header(wire.Kind.OK, 0), b"")
"""The answer to a token."""


class Visitor:
    """The server's end of one connection.

    Args:
        connection: non-blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.frames = connection, Frames()
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
        total = sum(wire.padded(t.nbytes) for t in answer.tensors)
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
        self.name = f"tfstyle-ps-{uuid.uuid4().hex}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listening.bind("\0" + self.name)
        self._listener = Listener(listening, server)
        self.number = self._listener.number
        self.visitors: dict[int, Visitor] = {}
        poller.register(self.number, flag)

    def admit(self) -> None:
        """Takes a new connection; who it is it has to tell."""
        connection = self._listener.accept(len(self.visitors))
        if connection is None:
            return
        connection.setblocking(False)
        self.visitors[connection.fileno()] = Visitor(connection)
        self._poller.register(connection.fileno(), self._flag)

    def identify(self, visitor: Visitor, message: bytes) -> bool:
        """Whether the first message of a connection is a token that was given out; answers it."""
        client = self._tokens.take(message)
        if client is None or client.has_entered:
            return False
        visitor.client, client.visitor = client, visitor
        return visitor.send([WELCOME])

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
        self._poller.unregister(self.number)
        self._listener.close()
