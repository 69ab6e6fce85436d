"""Shared memory between a server and one client on the same host: one half for requests, one for answers.

It has no name in the file system, so nothing is left behind, however the two ends end.
"""

from __future__ import annotations

import mmap
import os
import re

import torch

from tfstyle_dist.comm import diagnosis
from tfstyle_dist.core import env

_NAME = "tfstyle-ps-segment"
_PATH = re.compile(r"/proc/\d+/fd/\d+")


def host_id() -> str:
    """Tells whether two processes run on one machine (and in one IPC namespace); empty where nothing tells it."""
    try:
        boot = diagnosis.boot_id()
        return f"{boot} {os.stat('/dev/shm').st_dev} {env.host_name() or ''}" if boot else ""
    except OSError:
        return ""


class Segment:
    """A piece of memory mapped by both ends.

    Args:
        handle: the open memory; ``forget_path`` closes it.
        half: bytes of each half.

    Attributes:
        half: bytes of each half.
        path: where the other end finds it until ``forget_path``.
    """

    def __init__(self, handle: int, half: int) -> None:
        self._handle, self.half = handle, half
        self.path = f"/proc/{os.getpid()}/fd/{handle}"
        self._bytes = torch.frombuffer(mmap.mmap(handle, 2 * half), dtype=torch.uint8)

    @classmethod
    def create(cls, half: int) -> Segment:
        """A new segment, which only processes of this user can open.

        Raises:
            OSError: no shared memory, or not enough.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a name (memfd_create)")
        handle = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(handle, 0, 2 * half)
            return cls(handle, half)
        except BaseException:
            os.close(handle)
            raise

    @classmethod
    def attach(cls, path: str, half: int) -> Segment:
        """Maps a segment that the other end made.

        Raises:
            PermissionError: the path is no segment of this package.
            OSError: it is not there.
        """
        if not _PATH.fullmatch(path):
            raise PermissionError(f"{path} is no shared memory segment of a parameter server")
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not os.readlink(f"/proc/self/fd/{handle}").startswith(f"/memfd:{_NAME}"):
                raise PermissionError(f"{path} is no shared memory segment of a parameter server")
            if not 0 < 2 * half <= os.fstat(handle).st_size:
                raise PermissionError(f"{path} is smaller than 2 x {half} bytes, or these are no bytes at all")
            segment = cls(handle, half)
        except BaseException:
            os.close(handle)
            raise
        segment.forget_path()
        return segment

    def request(self, nbytes: int) -> torch.Tensor:
        """The bytes that go to the server."""
        return self._bytes[:nbytes]

    def answer(self, nbytes: int) -> torch.Tensor:
        """The bytes that come back."""
        return self._bytes[self.half : self.half + nbytes]

    def forget_path(self) -> None:
        """Both ends have mapped it, and nobody else shall."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def close(self) -> None:
        """Gives the memory back once no tensor refers to it."""
        self.forget_path()
        self._bytes = torch.empty(0, dtype=torch.uint8)
