"""When another worker counts as lost because it is silent or stopped.

Each worker decides that for itself; ``connection_loop`` drops the connection, and ``protocol`` goes on without it.
A worker is lost, too, when its connection ends or its process is gone (``connection_loop``), when it comes in too late
(``membership``), or when it computes other values than the others (``audit``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.elastic.connections.connection import Connection
from tfstyle_dist.elastic.connections.liveness import is_stopped
from tfstyle_dist.elastic.options import Elastic


class FailureDetector:
    """Looks after the connections of one worker, again and again.

    Args:
        me: this worker's number.
        options: of the job.
        here: the ``place`` of this process.
    """

    def __init__(self, me: int, options: Elastic, here: str) -> None:
        self._me, self._options, self._here = me, options, here
        self._looked = time.monotonic()

    def paused(self, connections: Sequence[Connection], now: float) -> float:
        """Seconds since this was called last.

        While this process does not look, the others are not silent for longer than they may be between two signs of
        life. After so many seconds that they have given up this process, which was stopped, whoever is gone did so.
        """
        paused, self._looked = now - self._looked, now
        if paused > self._options.beat_every:
            for connection in connections:
                connection.heard = min(now, connection.heard + paused - self._options.beat_every)
        if paused > self._options.suspect_after:
            get_logger().warning("worker %d stood still for %.1f s", self._me, paused)
            for connection in connections:
                connection.heard, connection.doubtful_until = now, now + self._options.suspect_after
        return paused

    def is_silent(self, connection: Connection, now: float) -> bool:
        """Whether a process of this host has missed a sign of life: its number is looked up then."""
        return connection.peer.get("place") == self._here and now - connection.heard > 2 * self._options.beat_every

    def why_lost(self, connection: Connection, now: float, paused: float) -> str:
        """What makes a worker count as lost; empty if nothing does.

        Args:
            connection: to it.
            now: the time.
            paused: seconds since the last look.
        """
        silent, limit = now - connection.heard, self._options.stopped_after
        if silent > self._options.suspect_after:
            return f"was silent for {silent:.1f} s"
        if limit is None or connection.peer.get("place") != self._here:
            return ""
        if silent <= self._options.beat_every or not is_stopped(connection.peer.get("pid")):
            connection.stopped = 0.0
            return ""
        connection.stopped += min(paused, limit / 2)  # all may have been stopped together, this process too
        return f"was stopped by a signal and stood still for {silent:.2f} s" if connection.stopped >= limit else ""
