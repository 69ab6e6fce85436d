"""Shared memory between a server and one client on the same host: one half for requests, one for answers."""

from __future__ import annotations

import mmap
import os
import uuid
from pathlib import Path

import torch

_FOLDER = Path("/dev/shm")


class Segment:
    """A piece of memory mapped by both ends.

    Args:
        memory: the mapping.
        half: bytes of each half.
        path: its name while it has one.
    """

    def __init__(self, memory: mmap.mmap, half: int, path: Path | None) -> None:
        self._memory, self.half, self.path = memory, half, path
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    @classmethod
    def create(cls, half: int) -> Segment:
        """A new segment with a name that only this user can open.

        Raises:
            OSError: no shared memory, or not enough.
        """
        path = _FOLDER / f"tfstyle-ps-{uuid.uuid4().hex}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, 2 * half)
            return cls(mmap.mmap(handle, 2 * half), half, path)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(handle)

    @classmethod
    def attach(cls, path: str, half: int) -> Segment:
        """Maps a segment that the other end made.

        Raises:
            PermissionError: the path is no segment of this package.
            OSError: it is not there.
        """
        place = Path(path)
        if place.parent != _FOLDER or not place.name.startswith("tfstyle-ps-"):
            raise PermissionError(f"{path} is no shared memory segment of a parameter server")
        handle = os.open(place, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if os.fstat(handle).st_size < 2 * half:
                raise PermissionError(f"{path} is smaller than 2 x {half} bytes")
            return cls(mmap.mmap(handle, 2 * half), half, None)
        finally:
            os.close(handle)

    def request(self, nbytes: int) -> torch.Tensor:
        """The bytes that go to the server."""
        return self._bytes[:nbytes]

    def answer(self, nbytes: int) -> torch.Tensor:
        """The bytes that come back."""
        return self._bytes[self.half : self.half + nbytes]

    def unlink(self) -> None:
        """Takes the name away: both ends have mapped it, so nothing stays behind after a crash."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None

    def close(self) -> None:
        """Gives the memory back once no tensor refers to it."""
        self.unlink()
        self._bytes = torch.empty(0, dtype=torch.uint8)
