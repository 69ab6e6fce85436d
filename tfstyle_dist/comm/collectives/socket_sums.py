"""Sums over sockets in a fixed order: what ``torch.distributed`` moves is added by the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tfstyle_dist.comm.collectives.flat import Add
from tfstyle_dist.comm.collectives.halving import Messages, tree_all_reduce
from tfstyle_dist.comm.group import Pending


class Transport(Protocol):
    """What sums need of a transport; no call compares sizes."""

    rank: int
    size: int

    def start_all_reduce(self, buffer: torch.Tensor, name: str) -> Pending:
        """Starts the library's own sum."""

    def start_gather(self, buffer: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Pending]:
        """Starts collecting the buffers of all workers, of one size."""

    def start_all_to_all(self, buffer: torch.Tensor, name: str) -> tuple[torch.Tensor, Pending]:
        """Starts sending the k-th of ``size`` equal parts to worker k; the other's parts in rank order."""

    def exchange(self, sends: Messages, receives: Messages, name: str) -> None:
        """Sends to and receives from workers by rank; returns when all is done."""


class Stages:
    """A ``Pending`` that goes on with more work when the first transfer is over.

    Args:
        first: the transfer under way, if any.
        rest: called once, by ``wait``.
    """

    def __init__(self, first: Pending | None, rest: Callable[[], None]) -> None:
        self._first, self._rest = first, [rest]

    def wait(self) -> None:
        """See ``Pending``."""
        if self._rest:
            if self._first is not None:
                self._first.wait()
            self._rest.pop()()

    def moving(self) -> bool:
        """See ``Pending``."""
        return self._first is not None and self._first.moving()


def sum_gathered(transport: Transport, buffer: torch.Tensor, name: str, add: Add) -> Pending:
    """All contributions to every worker."""
    parts, pending = transport.start_gather(buffer, name)
    return Stages(pending, lambda: add(parts, buffer))


def sum_slices(transport: Transport, buffer: torch.Tensor, name: str, add: Add) -> Pending:
    """A slice of all contributions to every worker; the sums are gathered."""
    part = -(-buffer.numel() // transport.size)
    padded = buffer
    if part * transport.size != buffer.numel():
        padded = buffer.new_zeros(part * transport.size)
        padded[: buffer.numel()] = buffer
    received, pending = transport.start_all_to_all(padded, name)

    def add_and_gather() -> None:
        total = torch.empty_like(received[:part])
        add(list(received.view(transport.size, part).unbind()), total)
        sums, gathering = transport.start_gather(total, name)
        gathering.wait()
        for rank, piece in enumerate(sums):
            target = buffer[rank * part : (rank + 1) * part]
            target.copy_(piece[: target.numel()])

    return Stages(pending, add_and_gather)


def sum_by_halving(transport: Transport, buffer: torch.Tensor, name: str, members: tuple[int, ...]) -> None:
    """The tree over ``members``, ranks of which this worker is one; returns when it is done."""

    def exchange(sends: Messages, receives: Messages) -> None:
        transport.exchange(_by_rank(sends, members), _by_rank(receives, members), name)

    tree_all_reduce(buffer, members.index(transport.rank), len(members), exchange)


def _by_rank(messages: Messages, members: tuple[int, ...]) -> Messages:
    return [(members[index], tensor) for index, tensor in messages if tensor.numel() > 0]
