"""What every transport does: the one interface of all ways between a client and a server.

Each transport is a ``Transport``, the client's end, and a ``Listener``, where its connections come in at the server.
``available.py`` lists both. Whoever connects introduces itself by ZeroMQ, and then asks for the best of them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from tfstyle_dist.parameter_server.protocol import byte_streams
from tfstyle_dist.parameter_server.protocol.handshake import Tokens
from tfstyle_dist.parameter_server.protocol.header import FLAG_INLINE, INLINE, Header, pack_message
from tfstyle_dist.parameter_server.protocol.operations import tensor_bytes
from tfstyle_dist.parameter_server.transports.client_session import ClientSession
from tfstyle_dist.parameter_server.transports.value_reader import ValueReader

# ---- the client's end -------------------------------------------------------------------------------------------


class Link(Protocol):
    """What a transport uses of the connection that it belongs to."""

    name: str
    address: str
    timeout: timedelta | None

    @property
    def socket(self) -> Any:
        """Of ZeroMQ."""

    @property
    def has_keys(self) -> bool:
        """Whether messages by ZeroMQ are encrypted."""

    def call_now(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Calls a method of the server by ZeroMQ; nothing else may be on its way."""

    def check(self) -> None:
        """Raises if the server is gone."""

    def wait(self) -> None:
        """Waits for a message by ZeroMQ."""


class Transport(ABC):
    """The client's end; a ``ConnectionError`` or ``TimeoutError`` that it raises means that the connection broke.

    Args:
        link: the connection that it belongs to.

    Attributes:
        name: for the log.
        is_near: the server is on this host, and its variables can be read where they are.
        most_unanswered: so many operations may wait for their answers; ``None``: any number.
        must_be_read: answers do not come by themselves while this process computes.
    """

    name: str
    is_near = False
    most_unanswered: int | None = None
    must_be_read = False

    def __init__(self, link: Link) -> None:
        self._link = link

    @classmethod
    @abstractmethod
    def open(cls, link: Link, server: dict[str, Any]) -> Transport | None:
        """Connects; ``None`` where this transport cannot be used, so that ``available.py`` asks the next one.

        Args:
            link: the connection, which has introduced itself by ZeroMQ.
            server: what the server answered.
        """

    def needs_all_answers(self, request_bytes: int, answer_bytes: int, data_is_due: Callable[[], bool]) -> bool:
        """Whether a request can be sent only when all earlier ones are answered.

        Args:
            request_bytes: of its tensors.
            answer_bytes: of the answer's tensors, at most.
            data_is_due: tells whether an earlier answer will bring tensors.
        """
        return False

    def make_room(self, nbytes: int) -> bool:
        """Makes room for a request or answer with so many bytes of tensors.

        Returns:
            Whether there is room; if not, this transport is of no use any more.
        """
        return True

    def send(self, header: Header, meta: bytes, tensors: Sequence[torch.Tensor], answer_bytes: int) -> None:
        """Sends a request.

        Args:
            header: of it; its flags say whether its tensors are in the same message.
            meta: its table.
            tensors: contiguous, on the CPU.
            answer_bytes: how many bytes of tensors the answer may bring.
        """
        total = header.data_bytes
        if total > INLINE:
            self.send_tensors(header, meta, tensors)
        elif total:
            joined = tensor_bytes(byte_streams.join_tensors(tensors, total))
            self.send_message([pack_message(header, meta), joined])
        else:
            self.send_message([pack_message(header, meta)])

    @abstractmethod
    def send_message(self, parts: Sequence[Any]) -> None:
        """Sends a message."""

    @abstractmethod
    def send_tensors(self, header: Header, meta: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Sends a request with tensors that are too large for a message."""

    @abstractmethod
    def receive(self) -> list[bytes]:
        """Waits for the next message."""

    def fill(self, header: Header, message: list[bytes], filler: byte_streams.Filler) -> None:
        """Puts the bytes of an answer where they belong."""
        if header.flags & FLAG_INLINE:
            filler.take(memoryview(message[1]))
        else:
            self.receive_tensors(header, filler)

    @abstractmethod
    def receive_tensors(self, header: Header, filler: byte_streams.Filler) -> None:
        """Takes the tensors of an answer that are too large for a message."""

    def has_ended(self) -> bool:
        """Whether the server is gone; asked when no answer is on its way."""
        self._link.check()
        return False

    def values(self, variables: Iterable[int]) -> ValueReader | None:
        """The variables that this process can read without asking; nothing may be on its way."""
        return None

    def sweep(self) -> None:  # noqa: B027 - most transports have none
        """Gives back values that are not used in place any more."""

    def say_goodbye(self, message: bytes) -> None:
        """Sends the last message."""
        self.send_message([message])

    def close(self) -> None:  # noqa: B027 - ZeroMQ alone is not closed by a transport
        """Ends what this transport has beside ZeroMQ."""


# ---- the server's end -------------------------------------------------------------------------------------------


class Host(Protocol):
    """What a listener uses of its server; the methods are called with its lock held."""

    name: str
    interface: str
    has_keys: bool
    lock: threading.Lock
    poller: Any
    tokens: Tokens

    def take_message(self, client: ClientSession, parts: list[bytes], channel: Any) -> None:
        """Works on a message."""

    def execute_taken(self, client: ClientSession, channel: Any) -> None:
        """Carries out a batch whose tensors have come."""

    def forget(self, client: ClientSession) -> None:
        """A client is gone."""


class Listener(Protocol):
    """Where the connections of a transport come in; the methods but ``close`` are called with the server's lock held.

    Attributes:
        number: the descriptor to poll.
    """

    number: int

    def invite(self, client: ClientSession) -> dict[str, Any]:
        """What a client needs in order to connect."""

    def admit(self) -> None:
        """Takes a new connection."""

    def serve(self, number: int, event: int) -> None:
        """Takes what has come at a descriptor that this listener polls, and does nothing for one of another."""

    def tick(self) -> None:
        """Called between requests."""

    def close(self) -> None:
        """Ends all connections; called without the server's lock."""
