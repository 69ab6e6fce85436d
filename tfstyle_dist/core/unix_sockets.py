"""Sockets in Linux's abstract namespace: no file is left behind, but anybody of the host may connect or take a name."""

from __future__ import annotations

import os
import socket
import struct
import uuid

_CREDENTIALS = struct.Struct("3i")


def new_name(kind: str) -> str:
    """A name that nobody can have taken before: it is drawn.

    Args:
        kind: what it is for.
    """
    return f"tfstyle-{kind}-{uuid.uuid4().hex}"


def listen(name: str, backlog: int) -> socket.socket:
    """A socket that processes of this host can connect to.

    Args:
        name: of ``new_name``.
        backlog: how many may wait to be taken.

    Raises:
        OSError: this system has no such sockets, or there is no file left for one.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind("\0" + name)
        made.listen(backlog)
    except OSError:
        made.close()
        raise
    return made


def connect(name: str, seconds: float | None) -> socket.socket:
    """A connection to the process of this user that listens at a name.

    Args:
        name: of the socket.
        seconds: limit of each wait from now on; ``None``: there is none.

    Raises:
        OSError: nobody listens there.
        PermissionError: the process that listens there is another user's.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if seconds is not None:  # waiting for room in the backlog is sending
            limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        made.connect("\0" + name)
        made.settimeout(seconds)
        if not is_same_user(made):
            raise PermissionError(f"the process that listens at {name} is another user's")
    except OSError:
        made.close()
        raise
    return made


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's.

    Args:
        connection: taken, or connected: then the process is the one that listened.
    """
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(told)[1]
    return user == os.geteuid()
