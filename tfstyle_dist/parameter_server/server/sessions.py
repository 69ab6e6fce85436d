"""What a parameter server knows of its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.parameter_server.protocol.header import Header
from tfstyle_dist.parameter_server.protocol.operations import Operation, tensor_bytes
from tfstyle_dist.parameter_server.transports.transfer_segment import Segment
from tfstyle_dist.parameter_server.transports.unix_listener import Visitor

if TYPE_CHECKING:
    from tfstyle_dist.parameter_server.transports.tcp import Carrier


class Client:
    """What the server knows of one client.

    Args:
        identity: of its first connection.
        way: of that one.
    """

    __slots__ = (
        "buffer", "carrier", "column", "header", "identity", "name", "operations", "refused", "role", "segment", "skip",
        "taken", "view", "visitor", "way",
    )  # fmt: skip

    def __init__(self, identity: bytes, way: Any) -> None:
        self.identity, self.way, self.role, self.name = identity, way, "", "somebody"
        self.visitor: Visitor | None = None
        self.carrier: Carrier | None = None
        self.column = -1  # where it marks what it uses in place
        self.header: Header | None = None  # of the batch whose bytes are on their way
        self.operations: list[Operation] = []
        self.taken = self.skip = 0
        self.buffer, self.view = torch.empty(0, dtype=torch.uint8), memoryview(b"")
        self.refused = False
        self.segment: Segment | None = None

    @property
    def has_entered(self) -> bool:
        """Whether it has a socket beside ZeroMQ: one is enough."""
        return self.visitor is not None or self.carrier is not None

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
