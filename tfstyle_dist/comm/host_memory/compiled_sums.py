"""The compiled form of sums in shared memory, as far as ``SharedSums`` knows it.

The layers above own the compiled code. It makes the same copies and additions, with the same barriers, as
``SharedSums`` itself, so that one worker may use it while the other does not, or does not yet.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tfstyle_dist.comm.collectives.flat import Flat

_LEAST_BYTES = 16 * 1024  # below, an addition costs less than a table of addresses


class Said(enum.IntEnum):
    """Why a call came back.

    It is done; others let it wait; or another does something else.
    """

    DONE = 0
    WAITS = 1
    DIFFERS = 2


class Call(Protocol):
    """One sum under way."""

    @property
    def count(self) -> int:
        """How many barriers this worker has come to."""

    def go_on(self) -> int:
        """Goes on until there is something to be ``Said``."""


class Begin(Protocol):
    """Compiled code for one kind of sum, of workers that know each other's memory."""

    def __call__(
        self, tensors: Sequence[torch.Tensor], divisor: int | None, digest: int, count: int, looks: int
    ) -> Call:
        """Begins a sum.

        Args:
            tensors: contiguous; their elements one after the other are summed in place.
            divisor: what the sum is divided by.
            digest: of what this worker is about to do.
            count: how many barriers this worker has come to.
            looks: how often to look for the others before the call ``WAITS``.
        """


@dataclass(frozen=True)
class Addresses:
    """Where the shared memory of the workers is.

    Attributes:
        workers: for each worker those of its words (how many barriers it has come to; the digests of even and odd
            barriers; whether it sleeps) and of its two staging areas, which are used in turn, barrier by barrier.
        results: those of the two areas for sums.
        sleep: that of the word at which workers sleep.
        rank: this worker's number.
        part_bytes: how much goes through a staging area at once.
    """

    workers: Sequence[Sequence[int]]
    results: Sequence[int]
    sleep: int
    rank: int
    part_bytes: int


@dataclass(frozen=True)
class Kind:
    """What is to be summed.

    Attributes:
        dtype: the element type.
        workers: how many workers.
        method: an ``AggregationMethod``: the order of the additions.
    """

    dtype: torch.dtype
    workers: int
    method: int


FindSum = Callable[[Kind, int], "Callable[[Addresses], Begin] | None"]
"""The compiled code for a kind of sum, if it is there; told the number of bytes that could be summed by it now."""


def nothing_compiled(kind: Kind, nbytes: int) -> None:
    """Finds nothing."""


class CompiledSums:
    """Begins compiled sums where that is possible.

    Args:
        find: gives the compiled code.
        addresses: where the workers' memory is.
    """

    def __init__(self, find: FindSum, addresses: Addresses) -> None:
        self._find, self._addresses = find, addresses
        self._found: dict[tuple[torch.dtype, int], Begin] = {}

    def call(self, flat: Flat, method: int, digest: int, count: int, looks: int) -> Call | None:
        """A sum of ``flat`` over all workers, or None if it is not for compiled code."""
        nbytes = flat.numel * flat.dtype.itemsize
        if nbytes < _LEAST_BYTES or (values := flat.in_place()) is None:
            return None
        begin = self._found.get((flat.dtype, method))
        if begin is None:
            found = self._find(Kind(flat.dtype, len(self._addresses.workers), method), nbytes)
            if found is None:
                return None
            begin = self._found[flat.dtype, method] = found(self._addresses)
        return begin(*values, digest, count, looks)
