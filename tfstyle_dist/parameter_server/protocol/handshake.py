"""How a client that has introduced itself by ZeroMQ shows on a plain socket that it is the same one: by a token."""

from __future__ import annotations

import secrets
from typing import Any

from tfstyle_dist.parameter_server.protocol.header import HEADER_SIZE, Header, Kind, pack_message

_TOKEN = 16
TOKEN_BYTES = HEADER_SIZE + _TOKEN
"""Of the message with a token: more is not taken from a stranger."""
TOKEN_SECONDS = 10.0
"""So long it may take."""
WELCOME = pack_message(Header(Kind.OK, 0), b"")
"""The answer to a token."""


def show_token(token: str) -> bytes:
    """The first message on a plain socket.

    Args:
        token: what ``Tokens.give`` gave.
    """
    content = bytes.fromhex(token)
    return pack_message(Header(Kind.HANDSHAKE, 0, meta_bytes=len(content)), content)


class Tokens:
    """Who may use a plain socket: a client that was told a token over its ZeroMQ connection."""

    def __init__(self) -> None:
        self._clients: dict[bytes, Any] = {}

    def give(self, client: Any) -> str:
        """Lets a client in, once."""
        made = secrets.token_bytes(_TOKEN)
        self._clients[made] = client
        return made.hex()

    def take(self, message: bytes) -> Any:
        """The client whose token is in the first message of a connection.

        Returns:
            ``None``: nobody was given that token, or its client has a plain socket already.
        """
        client = self._clients.pop(bytes(message[HEADER_SIZE:]), None)
        return None if client is None or client.connection is not None else client

    def forget(self, client: Any) -> None:
        """A client is gone."""
        self._clients = {token: other for token, other in self._clients.items() if other is not client}
