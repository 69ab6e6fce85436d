"""What a parameter server knows of one of its clients."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tfstyle_dist.parameter_server.protocol.header import Header
from tfstyle_dist.parameter_server.protocol.operations import Answer, Operation, tensor_bytes
from tfstyle_dist.parameter_server.transports.transfer_segment import TransferSegment


class Channel(Protocol):
    """The way that a client's message came, and its answer goes; ``False``: the client is gone.

    Attributes:
        batches_only: it carries no calls.
        is_trusted: nobody else can have written what comes.
    """

    batches_only: bool
    is_trusted: bool

    def send(self, parts: list[Any]) -> bool:
        """Sends a message, perhaps after this returns: its parts are the channel's own."""

    def stream(self, head: bytes, answer: Answer) -> bool:
        """Sends a message and the tensors of an answer, as they are now."""


class PlainConnection(Protocol):
    """A connection beside ZeroMQ, at the server."""

    def end(self) -> None:
        """Ends it."""

    def detach(self) -> None:
        """It goes on, but its end is not the client's any more."""


class ClientSession:
    """What the server knows of one client.

    Args:
        identity: of its ZeroMQ connection.
        channel: of that one.

    Attributes:
        connection: beside ZeroMQ; one is enough.
        data_channel: the only one by which tensors may come that are too large for a message.
    """

    __slots__ = (
        "buffer", "channel", "column", "connection", "data_channel", "header", "identity", "name", "operations",
        "refused", "role", "segment", "skip", "taken", "view",
    )  # fmt: skip

    def __init__(self, identity: bytes, channel: Channel) -> None:
        self.identity, self.channel, self.role, self.name = identity, channel, "", "somebody"
        self.connection: PlainConnection | None = None
        self.data_channel = channel
        self.column = -1  # where it marks what it uses in place
        self.header: Header | None = None  # of the batch whose bytes are on their way
        self.operations: list[Operation] = []
        self.taken = self.skip = 0
        self.buffer, self.view = torch.empty(0, dtype=torch.uint8), memoryview(b"")
        self.refused = False
        self.segment: TransferSegment | None = None

    def room(self, nbytes: int) -> torch.Tensor:
        """A buffer for the bytes of one batch; it is kept for the next one."""
        if self.buffer.numel() < nbytes:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
            self.view = tensor_bytes(self.buffer)
        return self.buffer[:nbytes]

    def drop_buffer(self) -> None:
        """No more tensors will come."""
        self.buffer, self.view = torch.empty(0, dtype=torch.uint8), memoryview(b"")

    def drop_segment(self) -> None:
        """Gives its shared memory back."""
        if self.segment is not None:
            self.segment.close()
            self.segment = None
