"""The connections that are open, and what comes through memory that workers of one host share.

What is in shared memory is taken by the thread of the program while it waits, and else by that of the connections.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from tfstyle_dist.core.errors import DataLossError
from tfstyle_dist.core.logging import get_logger, warn_once
from tfstyle_dist.core.strangers import Strangers
from tfstyle_dist.elastic.connections.connection import Connection
from tfstyle_dist.elastic.connections.packets import Packet

CHUNK = 1 << 20
"""Most bytes that are taken at once."""
_MOST_STRANGERS, _SECONDS_FOR_STRANGERS = 128, 10.0


def say_why_closed(connection: Connection, error: DataLossError) -> None:
    """Logs what came instead of a message; of those who have not said who they are, as of a port scan, once."""
    if connection.rank is None:
        text = (
            f"A connection from {connection.origin()} was closed: {error!s:.200} This is said once, also if more come."
        )
        warn_once("elastic: a stranger", text)
    else:
        get_logger().error("The connection to worker %s is given up: %s", connection.rank, error)


class OpenConnections:
    """The connections of one worker, by the other's number.

    Args:
        on_received: called with a connection and a packet that came through shared memory.
        on_broken: called with a connection through which nonsense came.

    Attributes:
        strangers: those that have dialled, and have not said which worker they are.
    """

    def __init__(
        self, on_received: Callable[[Connection, Packet], None], on_broken: Callable[[Connection], None]
    ) -> None:
        self._on_received, self._on_broken = on_received, on_broken
        self._lock = threading.Lock()
        self._reading = threading.RLock()  # of shared memory; taken before the locks of what is called
        self._by_rank: dict[int, Connection] = {}
        self.strangers = Strangers[Connection](_SECONDS_FOR_STRANGERS, _MOST_STRANGERS)

    def get(self, rank: int | None) -> Connection | None:
        """That to a worker; ``None`` if there is none."""
        with self._lock:
            return None if rank is None else self._by_rank.get(rank)

    def all(self) -> list[Connection]:
        """All, in no order."""
        with self._lock:
            return list(self._by_rank.values())

    def ranks(self) -> list[int]:
        """The workers there is a connection to."""
        with self._lock:
            return sorted(self._by_rank)

    def add(self, rank: int, connection: Connection) -> None:
        """There is one now."""
        self.strangers.forget(connection)
        with self._lock:
            self._by_rank[rank] = connection

    def end(self, connection: Connection) -> bool:
        """Takes what has come, and nothing after that; returns whether the connection was open."""
        with self._reading:
            if connection.rings is not None:
                self._take(connection)
            if self.get(connection.rank) is not connection:
                return False
            with self._lock:
                del self._by_rank[connection.rank]  # type: ignore[arg-type]
            return True

    def has_more(self, others: Iterable[int]) -> bool:
        """Whether something was kept for workers that read it from shared memory."""
        found = [connection for other in others if (connection := self.get(other)) is not None]
        return any(connection.rings is not None and connection.has_more() for connection in found)

    def look(self) -> bool:
        """Takes what has come in shared memory, and writes what was kept; returns whether something has come."""
        found = False
        with self._reading:
            for connection in self.all():
                if connection.rings is not None:
                    connection.flush()
                    found |= self._take(connection)
        return found

    def _take(self, connection: Connection) -> bool:
        found = False
        try:
            for packet in connection.receive(CHUNK):
                found = True
                self._on_received(connection, packet)
        except DataLossError as error:
            say_why_closed(connection, error)
            self._on_broken(connection)
        return found
