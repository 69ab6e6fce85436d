"""The ways that a server's messages take to a client, and what of an answer goes where."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tfstyle_dist.parameter_server import streams, wire, zmq_link
from tfstyle_dist.parameter_server.segment import Segment
from tfstyle_dist.parameter_server.table import Answer
from tfstyle_dist.parameter_server.wire import Header, Kind


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
        except zmq_link.ZMQError:
            return False
        return True

    def stream(self, head: bytes, answer: Answer) -> bool:
        """Sends a message and the tensors of an answer, in messages of limited size."""
        if not self.send([head]):
            return False
        for chunk in streams.stream(answer.tensors):
            try:
                self._socket.send(self._identity, zmq_link.SNDMORE)
                self._socket.send(chunk)
            except zmq_link.ZMQError:
                return False
        return True


def refusal(request: int, error: BaseException) -> bytes:
    """The message that tells a client of an error."""
    meta = wire.pack_error(error)
    return wire.message(Header(Kind.ERROR, request, meta_bytes=len(meta)), meta)


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
    meta = wire.pack_operations(answer.operations)
    total = sum(wire.padded(t.nbytes) for t in answer.tensors)
    if not header.flags & wire.FLAG_SHARED:
        segment = None

    def head(flags: int = 0) -> bytes:
        found = Header(Kind.OK, header.request, meta_bytes=len(meta), data_bytes=total, flags=flags)
        return wire.message(found, meta)

    if total == 0:
        return way.send([head()])
    if segment is not None and wire.INLINE < total <= segment.half:
        streams.pack(answer.tensors, segment.answer(total))
        return way.send([head(wire.FLAG_SHARED)])
    if total <= wire.INLINE:
        flat = torch.empty(total, dtype=torch.uint8)
        streams.pack(answer.tensors, flat)
        return way.send([head(wire.FLAG_INLINE), wire.tensor_bytes(flat)])
    return way.stream(head(), answer)
