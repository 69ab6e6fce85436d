"""Who is there before the job has begun for this worker, and what came too early."""

from __future__ import annotations

from collections.abc import Sequence

from tfstyle_dist.elastic.connections.address_lookup import Address
from tfstyle_dist.elastic.connections.packets import Packet


class Startup:
    """The time from the start of a process until its job begins.

    Args:
        me: this worker's number.
        addresses: of all workers.

    Attributes:
        addresses: of all workers.
        up: the workers there is a connection to, and this one.
        gone: those that were there: whether the process is known to be gone.
    """

    def __init__(self, me: int, addresses: Sequence[Address]) -> None:
        self.addresses, self._me = list(addresses), me
        self.up = {me}
        self.gone: dict[int, bool] = {}
        self._ready: set[int] = set()
        self._early: list[tuple[int, Packet]] = []

    @property
    def everyone(self) -> tuple[int, ...]:
        """All workers."""
        return tuple(range(len(self.addresses)))

    @property
    def others(self) -> list[int]:
        """All workers but this one."""
        return [worker for worker in self.everyone if worker != self._me]

    @property
    def absent(self) -> list[int]:
        """The workers there is no connection to."""
        return [worker for worker in self.everyone if worker not in self.up]

    @property
    def not_ready(self) -> list[int]:
        """The others that have not said that they have a connection to all."""
        return [worker for worker in self.others if worker not in self._ready]

    @property
    def is_complete(self) -> bool:
        """Whether each two of them have a connection."""
        return not self.absent and not self.not_ready

    def lose(self, other: int, dead: bool) -> None:
        """A connection is gone."""
        self.up.discard(other)
        self._ready.discard(other)
        self.gone[other] = dead

    def take(self, sender: int, packet: Packet) -> None:
        """A message came: that a worker has all connections, or what is kept until the job has begun here."""
        if packet.header.get("is") == "ready":
            self._ready.add(sender)
        else:
            self._early.append((sender, packet))

    def early(self) -> list[tuple[int, Packet]]:
        """What was kept, once."""
        early, self._early = self._early, []
        return early
