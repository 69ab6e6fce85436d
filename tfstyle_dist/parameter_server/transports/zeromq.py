"""ZeroMQ: every client and server has this transport, and the others begin with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.parameter_server.protocol import byte_streams, zeromq_sockets
from tfstyle_dist.parameter_server.protocol.header import Header, pack_message
from tfstyle_dist.parameter_server.protocol.operations import Answer
from tfstyle_dist.parameter_server.transports.transport import Link, Transport


class ZeroMQTransport(Transport):
    """Tensors travel in messages of limited size."""

    name = "ZeroMQ"

    @classmethod
    def open(cls, link: Link, server: dict[str, Any]) -> ZeroMQTransport | None:
        """Everywhere: the link is there."""
        return cls(link)

    def send_message(self, parts: Sequence[Any]) -> None:
        """Sends a message."""
        self._link.socket.send_multipart(parts)

    def send_tensors(self, header: Header, meta: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Sends a request and its tensors."""
        socket = self._link.socket
        socket.send(pack_message(header, meta))
        for chunk in byte_streams.stream(tensors):
            socket.send(chunk)

    def receive(self) -> list[bytes]:
        """Waits for the next message."""
        self._link.wait()
        message: list[bytes] = self._link.socket.recv_multipart()
        return message

    def receive_tensors(self, header: Header, filler: byte_streams.Filler) -> None:
        """Takes the tensors of an answer."""
        taken = 0
        while taken < header.data_bytes:
            self._link.wait()
            frame = self._link.socket.recv(copy=False)
            taken += len(frame.buffer)
            filler.take(frame.buffer)


class ZeroMQChannel:
    """The server's end.

    Args:
        socket: of the server.
        identity: of the client.
    """

    batches_only, is_trusted = False, True

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
