"""Dialling other workers again and again, without waiting."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from tfstyle_dist.elastic.connections.address_lookup import AddressLookup
from tfstyle_dist.elastic.connections.connection import Connection

_AGAIN = 0.05
_AGAIN_LATER = 0.2
_IMPATIENT_SECONDS = 10.0


class Dialler:
    """The attempts that are under way.

    Args:
        lookups: of the addresses of all workers.
        give_up_after: seconds after which an attempt is replaced by another one.
    """

    def __init__(self, lookups: Sequence[AddressLookup], give_up_after: float) -> None:
        self._lookups, self._give_up_after = lookups, give_up_after
        self._started = time.monotonic()
        self._last: dict[int, float] = {}
        self._open: dict[int, Connection] = {}

    def overdue(self, rank: int, now: float) -> Connection | None:
        """An attempt that has taken too long."""
        return self._open.get(rank) if now - self._last.get(rank, now) > self._give_up_after else None

    def dial(self, rank: int, now: float) -> Connection | None:
        """A new attempt, if it is time for one and none is under way."""
        again = _AGAIN if now - self._started < _IMPATIENT_SECONDS else _AGAIN_LATER
        if rank in self._open or now - self._last.get(rank, 0.0) <= again:
            return None
        self._last[rank] = now
        found = self._lookups[rank].found()
        if found is None:
            return None
        with contextlib.suppress(OSError):
            family, kind, protocol, _, address = found
            dialled = socket.socket(family, kind, protocol)
            dialled.setblocking(False)
            dialled.connect_ex(address)
            self._open[rank] = Connection(dialled, rank)
            return self._open[rank]
        return None

    def end(self, connection: Connection) -> None:
        """An attempt has succeeded, or is given up."""
        if connection.rank is not None and self._open.get(connection.rank) is connection:
            del self._open[connection.rank]
