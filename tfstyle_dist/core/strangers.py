"""Connections whose other end has not said yet who it is, as a port scan's: they are few, and not for long."""

from __future__ import annotations

import time
from typing import Generic, TypeVar

Connection = TypeVar("Connection")


class Strangers(Generic[Connection]):
    """The connections of a listening socket that are waited for.

    Args:
        seconds: that each has to say who it is.
        most: how many may wait; where there are more, those go that have waited longest. ``None``: as many as come.
    """

    def __init__(self, seconds: float, most: int | None = None) -> None:
        self._seconds, self._most = seconds, most
        self._until: dict[Connection, float] = {}  # the first one has the least time

    def admit(self, connection: Connection) -> None:
        """Somebody has connected."""
        self._until[connection] = time.monotonic() + self._seconds

    def forget(self, connection: Connection) -> None:
        """It has said who it is, or is gone."""
        self._until.pop(connection, None)

    def late(self) -> list[Connection]:
        """Those that are to be closed: their time is over, or there are too many; they are forgotten."""
        now, too_many = time.monotonic(), 0 if self._most is None else len(self._until) - self._most
        late = [each for number, (each, until) in enumerate(self._until.items()) if number < too_many or until <= now]
        for each in late:
            del self._until[each]
        return late
