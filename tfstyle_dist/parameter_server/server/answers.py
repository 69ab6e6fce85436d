"""The ways that a server's messages take to a client, and what of an answer goes where."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tfstyle_dist.parameter_server.protocol import byte_streams
from tfstyle_dist.parameter_server.protocol.header import (
    FLAG_INLINE,
    FLAG_SHARED,
    INLINE,
    Header,
    Kind,
    pack_error,
    pack_message,
)
from tfstyle_dist.parameter_server.protocol.operations import pack_operations, padded, tensor_bytes
from tfstyle_dist.parameter_server.server.table import Answer
from tfstyle_dist.parameter_server.transports import zeromq_sockets
from tfstyle_dist.parameter_server.transports.transfer_segment import Segment


class Way(Protocol):
    """A connection, as the server uses it; ``False``: the client is gone."""

    def send(self, parts: list[Any]) -> bool:
        """Sends a message, perhaps after this returns: its parts are the way's own."""

    def stream(self, head: bytes, answer: Answer) -> bool:
        """Sends a message and the tensors of an answer, as they are now."""


class OverZmq:
    """ZeroMQ: every client has this way.

    Args:
        socket: of the server.
        identity: of the client.
    """

    def __init__(self, socket: Any, identity: bytes) -> None:
        self._socket, self._identity = socket, identity

    def send(self, parts: list[Any]) -> bool:
        """Sends a message."""
        try:
            self._socket.send_multipart([self._identity, *parts])
        except zeromq_sockets.ZMQError:
            return False
        return True

    def stream(self, head: bytes, answer: Answer) -> bool:
        """Sends a message and the tensors of an answer, in messages of limited size."""
        if not self.send([head]):
            return False
        for chunk in byte_streams.stream(answer.tensors):
            try:
                self._socket.send(self._identity, zeromq_sockets.SNDMORE)
                self._socket.send(chunk)
            except zeromq_sockets.ZMQError:
                return False
        return True


def refusal(request: int, error: BaseException) -> bytes:
    """The message that tells a client of an error."""
    meta = pack_error(error)
    return pack_message(Header(Kind.ERROR, request, meta_bytes=len(meta)), meta)


def send_answer(way: Way, segment: Segment | None, header: Header, answer: Answer) -> bool:
    """Answers a batch.

    Args:
        way: that the batch came.
        segment: the client's shared memory.
        header: of the batch.
        answer: to it.

    Returns:
        Whether the client is still there.

    Raises:
        InvalidArgumentError: the answer is too large for this client's shared memory.
    """
    meta = pack_operations(answer.operations)
    total = sum(padded(t.nbytes) for t in answer.tensors)
    if not header.flags & FLAG_SHARED:
        segment = None

    def head(flags: int = 0) -> bytes:
        found = Header(Kind.OK, header.request, meta_bytes=len(meta), data_bytes=total, flags=flags)
        return pack_message(found, meta)

    if total == 0:
        return way.send([head()])
    if segment is not None and INLINE < total <= segment.half:
        byte_streams.pack(answer.tensors, segment.answer(total))
        return way.send([head(FLAG_SHARED)])
    if total <= INLINE:
        flat = torch.empty(total, dtype=torch.uint8)
        byte_streams.pack(answer.tensors, flat)
        return way.send([head(FLAG_INLINE), tensor_bytes(flat)])
    return way.stream(head(), answer)
