"""Memory that processes of a host share: a file that no folder has, so nothing is left behind, however they end.

Workers of a group hand it to each other through a socket, in whichever container they run. Which of them live, a lock
on the file tells: the system frees a process's locks when it ends. Where there is no such moment, the other process
finds it in ``/proc``, and knows it by a name that was drawn.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

from tfstyle_dist.core import unix_sockets

_MODE = 0o600
_LOCK = struct.Struct("hhqqi")
"""The kernel's ``struct flock``: kind, from where, start, length, process."""
_KIND, _HANDLE = struct.Struct("h"), struct.Struct("i")
Gather = Callable[[Any, str], list[Any]]


def create(name: str, nbytes: int, reserve: bool = False) -> int:
    """Makes memory, for this user alone.

    Args:
        name: shown where the system lists it.
        nbytes: its size.
        reserve: take all of its pages now; else each is taken when it is written.

    Returns:
        The open file.

    Raises:
        OSError: this system has no such memory, there is no file left for it, or not so much memory to reserve.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a name (memfd_create)")
    handle = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.fchmod(handle, _MODE)
        os.ftruncate(handle, nbytes)
        if reserve:
            os.posix_fallocate(handle, 0, nbytes)
    except OSError:
        os.close(handle)
        raise
    return handle


def find(process: int, number: int, name: str, nbytes: int) -> int:
    """Opens memory of another process of this host, user and pid namespace.

    Args:
        process: its id.
        number: of the file there.
        name: that the process has given to ``create``, with a part that was drawn: the id and the number may belong to
            another process or file by now, or in this container.
        nbytes: the least size.

    Returns:
        The open file.

    Raises:
        PermissionError: it is another file, or smaller.
        OSError: it is not there.
    """
    path, wanted = f"/proc/{int(process)}/fd/{int(number)}", f"/memfd:{name} (deleted)"
    if os.readlink(path) != wanted:
        raise PermissionError(f"{path} is not the memory {name} that was announced")
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{handle}") != wanted:
            raise PermissionError(f"{path} is not the memory {name} that was announced")
        if os.fstat(handle).st_size < nbytes:
            raise PermissionError(f"{path} is smaller than {nbytes} bytes")
    except OSError:
        os.close(handle)
        raise
    return handle


def hand_out(
    handle: int | None, rank: int, here: Sequence[int], gather: Gather, timeout: timedelta | None, name: str
) -> int | None:
    """Gives the file of each host's first worker to the others of the host; all workers come here.

    Args:
        handle: the open file; ``None`` if there is none, and on all but the first worker of a host.
        rank: this worker.
        here: the workers of this host, itself among them.
        gather: the values of all workers in rank order, with a name for messages.
        timeout: limit of each wait.
        name: for messages.

    Returns:
        This worker's open file, that it has to close; ``None`` if it got none: the first worker has none, runs as
        another user, or cannot be reached (another network namespace).
    """
    with ExitStack() as sockets:
        address, listener, connection = "", None, None
        if handle is not None and len(here) > 1:
            with suppress(OSError):
                address = unix_sockets.new_name("memory")
                listener = sockets.enter_context(unix_sockets.listen(address, len(here)))
        address = gather(address if listener is not None else "", name)[here[0]]
        if address and rank != here[0]:
            with suppress(OSError):
                connection = unix_sockets.connect(address, None if timeout is None else timeout.total_seconds())
                sockets.enter_context(connection)
        gather(None, name)  # now all who could have connected
        if listener is not None and handle is not None:
            _serve(listener, handle)
        return handle if rank == here[0] else _receive(connection)


def _serve(listener: socket.socket, handle: int) -> None:
    """Gives a file to those of this user who wait for it."""
    listener.setblocking(False)
    with suppress(OSError):  # nobody waits any more
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                if unix_sockets.is_same_user(connection):
                    socket.send_fds(connection, [b"!"], [handle])


def _receive(connection: socket.socket | None) -> int | None:
    if connection is not None:
        with suppress(OSError):
            # Not recv_fds, which drops the flag: the file would be inherited by every program that is started.
            _, told, *_ = connection.recvmsg(1, socket.CMSG_LEN(_HANDLE.size), socket.MSG_CMSG_CLOEXEC)
            for level, kind, content in told:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    handle: int = _HANDLE.unpack(content)[0]
                    return handle
    return None


class Presence:
    """Which workers hold a file: each has a lock on a byte of its own, as long as its process lives.

    Args:
        handle: the open file; it is closed by ``leave``. No other one of this file may be closed in this process:
            that would free the lock.
        index: this worker's number on the host.

    Raises:
        OSError: locks are not possible here.
    """

    def __init__(self, handle: int, index: int) -> None:
        self._handle = handle
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)

    def is_gone(self, index: int) -> bool:
        """Whether another worker, which has held the file, does not any more."""
        if self._handle < 0:
            return False
        question = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)
        try:
            kind: int = _KIND.unpack_from(fcntl.fcntl(self._handle, fcntl.F_GETLK, question))[0]
        except OSError:
            return False
        return kind == fcntl.F_UNLCK

    def leave(self) -> None:
        """Lets go of the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
