"""A process that was forked, such as one of a DataLoader, does not keep the connections of its parent open.

Else the others would learn of the parent's end only from its silence, and its port would stay in use.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence
from typing import Protocol


class HasSockets(Protocol):
    """What has sockets open."""

    def sockets(self) -> Sequence[socket.socket]:
        """All that are open."""


_HOLDERS: weakref.WeakSet[HasSockets] = weakref.WeakSet()


def close_in_children(holder: HasSockets) -> None:
    """Closes a child's copies of sockets; those of this process stay open."""
    _HOLDERS.add(holder)


def _close() -> None:
    for holder in list(_HOLDERS):
        for copy in holder.sockets():
            copy.close()


os.register_at_fork(after_in_child=_close)
