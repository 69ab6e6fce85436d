"""Shared memory between a server and one client on the same host: one half for requests, one for answers.

It has no name in the file system, so nothing is left behind, however the two ends end.
"""

from __future__ import annotations

import mmap
import os
import uuid
from typing import Any

import torch

from tfstyle_dist.parameter_server.protocol import call_fields
from tfstyle_dist.shm import memory_file

_NAME = "tfstyle-ps-segment"


class TransferSegment:
    """A piece of memory mapped by both ends.

    Args:
        handle: the open memory; ``forget_location`` closes it.
        half: bytes of each half.
        name: of the memory.

    Attributes:
        half: bytes of each half.
    """

    def __init__(self, handle: int, half: int, name: str) -> None:
        self._handle, self.half, self._name = handle, half, name
        self._bytes = torch.frombuffer(mmap.mmap(handle, 2 * half), dtype=torch.uint8)

    @classmethod
    def create(cls, half: int) -> TransferSegment:
        """A new segment, which only processes of this user can open.

        Raises:
            OSError: no shared memory, or not enough.
        """
        name = f"{_NAME}-{uuid.uuid4().hex}"
        handle = memory_file.create(name, 2 * half, reserve=True)
        try:
            return cls(handle, half, name)
        except BaseException:
            os.close(handle)
            raise

    @property
    def location(self) -> dict[str, Any]:
        """Where the other end finds it until ``forget_location``."""
        return {"process": os.getpid(), "file": self._handle, "name": self._name, "half": self.half}

    @classmethod
    def attach(cls, location: dict[str, Any]) -> TransferSegment:
        """Maps a segment that the other end made.

        Args:
            location: what ``location`` gives there.

        Raises:
            PermissionError: it is no segment of this package, or another one.
            OSError: it is not there.
        """
        name, half = str(location.get("name")), call_fields.number(location, "half", 1 << 48)
        if not name.startswith(_NAME) or half <= 0:
            raise PermissionError(f"{name!r} with 2 x {half} bytes is no shared memory segment of a parameter server")
        process = call_fields.number(location, "process", 1 << 32)
        handle = memory_file.find(process, call_fields.number(location, "file", 1 << 32), name, 2 * half)
        try:
            segment = cls(handle, half, name)
        except BaseException:
            os.close(handle)
            raise
        segment.forget_location()
        return segment

    def request(self, nbytes: int) -> torch.Tensor:
        """The bytes that go to the server."""
        return self._bytes[:nbytes]

    def answer(self, nbytes: int) -> torch.Tensor:
        """The bytes that come back."""
        return self._bytes[self.half : self.half + nbytes]

    def forget_location(self) -> None:
        """Both ends have mapped it, and nobody else shall."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def close(self) -> None:
        """Gives the memory back once no tensor refers to it."""
        self.forget_location()
        self._bytes = torch.empty(0, dtype=torch.uint8)
