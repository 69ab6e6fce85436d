"""Which workers share a host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The workers of each host.

    Attributes:
        hosts: the ranks of each host in rising order, hosts in the order of their first rank.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, said: Sequence[Hashable]) -> Topology:
        """The topology of workers that say where they are.

        Args:
            said: something for each rank that is equal where the host is the same.
        """
        by_host: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(said):
            by_host.setdefault(host, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in by_host.values()))

    @property
    def size(self) -> int:
        """The number of workers."""
        return sum(len(ranks) for ranks in self.hosts)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of ``rank``, itself among them."""
        return next(ranks for ranks in self.hosts if rank in ranks)

    def column(self, rank: int) -> tuple[int, ...]:
        """The workers with the index of ``rank`` on their hosts, one for each host; hosts must be ``aligned``."""
        index = self.neighbours(rank).index(rank)
        return tuple(ranks[index] for ranks in self.hosts)

    @property
    def aligned(self) -> bool:
        """Whether the sum of each host is a branch of the tree over all ranks.

        The tree splits at powers of two, so hosts must hold equally many consecutive ranks, a power of two of them.
        """
        each = len(self.hosts[0])
        consecutive = [r for ranks in self.hosts for r in ranks] == list(range(self.size))
        return consecutive and each & (each - 1) == 0 and all(len(ranks) == each for ranks in self.hosts)
