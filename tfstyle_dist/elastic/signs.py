"""Whether another worker gives signs of life, and what it is told when it does not."""

from __future__ import annotations

from tfstyle_dist.elastic.connection import Connection
from tfstyle_dist.elastic.options import Elastic
from tfstyle_dist.elastic.presence import is_stopped


class Signs:
    """Looks after the connections of one worker.

    Args:
        options: of the job.
        here: the ``place`` of this process.
    """

    def __init__(self, options: Elastic, here: str) -> None:
        self._options, self._here = options, here

    @property
    def shortest(self) -> float:
        """Seconds after which the others may have given up a process that stands still."""
        return min(self._options.suspect_after, self._options.stopped_after or self._options.suspect_after)

    def is_silent(self, connection: Connection, now: float) -> bool:
        """Whether a process of this host has missed a sign of life: it is looked for then."""
        return connection.peer.get("place") == self._here and now - connection.heard > 2 * self._options.beat_every

    def why_lost(self, connection: Connection, now: float) -> str:
        """What makes a worker count as lost; empty if nothing does."""
        silent = now - connection.heard
        if silent > self._options.suspect_after:
            return f"was silent for {silent:.1f} s"
        limit = self._options.stopped_after
        if limit is not None and connection.peer.get("place") == self._here and silent > self._options.beat_every / 2:
            if not is_stopped(connection.peer.get("pid")):
                connection.stopped = 0.0
            elif not connection.stopped:
                connection.stopped = now
            elif now - connection.stopped >= limit:
                return f"was stopped by a signal {now - connection.stopped:.2f} s ago"
        return ""
