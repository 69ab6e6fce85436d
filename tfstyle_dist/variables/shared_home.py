"""Parameters in memory that the workers of one host share: one copy of the model per host.

A worker reads its parameters in place. What it writes to them itself, such as ``p.data.clamp_()``, stays its own until
the next update, as if it had a copy; then the workers, which all made the same write, put it into the shared values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.shm.segment import Segment, open_segment
from tfstyle_dist.variables.record import Record, raw

_ALIGNMENT = 64


class Place:
    """Where one record's values are.

    Args:
        segment: the shared memory.
        offset: of the first byte.
        like: a tensor of the record's size and dtype.

    Attributes:
        flat: all elements in the order of the memory; writes are seen by every worker.
        address: of the values as the record's tensor shows them.
    """

    def __init__(self, segment: Segment, offset: int, like: torch.Tensor) -> None:
        self.segment, self.size, self.strides, self.dtype = segment, like.shape, dense_strides(like), like.dtype
        self._bytes = slice(offset, offset + like.numel() * like.element_size())
        self.flat = segment.shared[self._bytes].view(like.dtype)
        self.address = segment.private.data_ptr() + offset

    def own_view(self) -> torch.Tensor:
        """The values as a worker reads them; writes stay with the worker."""
        return self.segment.private[self._bytes].view(self.dtype).as_strided(self.size, self.strides)

    def shared_view(self) -> torch.Tensor:
        """The values themselves; writes are seen by every worker."""
        return self.flat.as_strided(self.size, self.strides)


class SharedHome:
    """Moves the records of one strategy to shared memory and keeps the workers' views equal.

    Args:
        group: the workers of one host.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._places: weakref.WeakKeyDictionary[Record, Place] = weakref.WeakKeyDictionary()
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()

    def place_of(self, record: Record) -> Place | None:
        """Where a record is; ``None`` when it is not shared."""
        return self._places.get(record)

    def move_in(self, records: Iterable[Record]) -> list[Record]:
        """Gives records the first worker's values, in one shared copy; collective.

        Args:
            records: of the same shapes and dtypes, in the same order, on all workers.

        Returns:
            Those that cannot be shared: buffers, which each replica has its own of, empty ones, other devices.
        """
        shared: list[Record] = []
        rest: list[Record] = []
        for record in records:
            first = record.components[0].detach()
            fits = record.kind != "buffer" and first.numel() > 0 and first.layout is torch.strided
            (shared if fits and torch.Tensor.device.__get__(first).type == "cpu" else rest).append(record)
        if not shared:
            return rest
        offsets, total = offsets_of([r.components[0] for r in shared])
        segment = open_segment(self._group, total, "parameters")
        places = [Place(segment, o, r.components[0].detach()) for r, o in zip(shared, offsets, strict=True)]
        with torch.no_grad(), raw():
            if self._group.rank == 0:
                for record, place in zip(shared, places, strict=True):
                    place.shared_view().copy_(record.components[0].detach())
                segment.unmap_shared()
            self._group.numbers(0, "initial values are in shared memory")
            for record, place in zip(shared, places, strict=True):
                record.set_data(place.own_view())
                self._places[record] = place
        self._segments.add(segment)
        return rest

    def moved_out(self, records: Sequence[Record]) -> list[Record]:
        """Those that were shared and got other storage, e.g. by ``module.double()``."""
        return [
            r
            for r in records
            if (place := self._places.get(r)) is not None and r.components[0].data_ptr() != place.address
        ]

    def written(self) -> list[tuple[Segment, list[tuple[int, int]]]]:
        """What this worker wrote to its parameters since the last update."""
        found = [(s, s.written()) for s in list(self._segments)]
        return [(segment, ranges) for segment, ranges in found if ranges]

    def publish(self, written: Sequence[tuple[Segment, list[tuple[int, int]]]]) -> None:
        """Puts what all workers wrote alike into the shared values, each worker a part of it; collective."""
        rank, size = self._group.rank, self._group.size
        for segment, ranges in written:
            low, high = (segment.nbytes * r // size for r in (rank, rank + 1))
            for start, stop in ranges:
                mine = slice(max(start, low), min(stop, high))
                if mine.stop > mine.start:
                    segment.shared[mine].copy_(segment.private[mine])
        self._group.numbers(0, "written parameters are shared")
        for segment, ranges in written:
            for start, stop in ranges:
                segment.forget(start, stop)


def dense_strides(like: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor without gaps that is laid out as ``like`` is (channels last, for one)."""
    return torch.empty_like(like, device="meta", memory_format=torch.preserve_format).stride()


def offsets_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins when they lie one after the other, and the bytes of all."""
    offsets, total = [], 0
    for tensor in tensors:
        offsets.append(total)
        total += tensor.numel() * tensor.element_size()
        total += -total % _ALIGNMENT
    return offsets, total
