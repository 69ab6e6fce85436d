"""What a parameter server knows of its clients."""

from __future__ import annotations

import torch

from tfstyle_dist.parameter_server import wire
from tfstyle_dist.parameter_server.door import Visitor
from tfstyle_dist.parameter_server.segment import Segment
from tfstyle_dist.parameter_server.wire import Header


class Client:
    """What the server knows of one connection."""

    __slots__ = (
        "buffer", "column", "header", "identity", "name", "operations", "refused", "role", "segment", "skip", "taken",
        "visitor",
    )  # fmt: skip

    def __init__(self, identity: bytes) -> None:
        self.identity, self.role, self.name = identity, "", "somebody"
        self.visitor: Visitor | None = None
        self.column = -1  # where it marks what it uses in place
        self.header: Header | None = None  # of the batch whose bytes are on their way
        self.operations: list[wire.Operation] = []
        self.buffer, self.taken = torch.empty(0, dtype=torch.uint8), 0
        self.skip = 0
        self.refused = False
        self.segment: Segment | None = None

    def room(self, nbytes: int) -> torch.Tensor:
        """A buffer for the bytes of one batch; it is kept for the next one."""
        if self.buffer.numel() < nbytes:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self.buffer[:nbytes]

    def drop_segment(self) -> None:
        """Gives its shared memory back."""
        if self.segment is not None:
            self.segment.close()
            self.segment = None
