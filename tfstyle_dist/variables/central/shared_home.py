"""Parameters in memory that the workers of one host share: one copy of the model per host.

A worker reads its parameters in place. What it writes to them itself, such as ``p.data.clamp_()``, stays its own until
the next update, as if it had a copy; then the workers, which all made the same write, put it into the shared values.

A parameter that shares its memory with something else, such as another parameter or a vector of all weights, stays
where it is: each worker has a copy then, which it updates itself.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.core import torch_internals
from tfstyle_dist.shm.segment import Segment, Written, open_segment, written_in
from tfstyle_dist.variables.content.parameter_marks import extent_of
from tfstyle_dist.variables.record import Record, raw

_ALIGNMENT = 64


class Place:
    """Where one record's values are.

    Args:
        segment: the shared memory.
        offset: of the first byte.
        like: a tensor of the record's size and dtype.

    Attributes:
        start: of the bytes in the segment.
        stop: of the bytes in the segment.
        flat: all elements in the order of the memory; writes are seen by every worker.
        address: of the values as the record's tensor shows them.
    """

    def __init__(self, segment: Segment, offset: int, like: torch.Tensor) -> None:
        self.segment, self.size, self.strides, self.dtype = segment, like.shape, dense_strides(like), like.dtype
        self.start, self.stop = offset, offset + like.numel() * like.element_size()
        self.flat = segment.shared[self.start : self.stop].view(like.dtype)
        self.address = segment.private.data_ptr() + offset

    def own_view(self) -> torch.Tensor:
        """The values as a worker reads them; writes stay with the worker."""
        return self.segment.private[self.start : self.stop].view(self.dtype).as_strided(self.size, self.strides)

    def shared_view(self) -> torch.Tensor:
        """The values themselves; writes are seen by every worker."""
        return self.flat.as_strided(self.size, self.strides)


class SharedHome:
    """Moves the records of one strategy to shared memory and keeps the workers' views equal.

    Args:
        group: the workers of one host.

    Attributes:
        moves: how often records were given another place.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.moves = 0
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
            Those that are not shared: buffers, which each replica has its own of, empty ones, other devices, and what
            shares its memory already.
        """
        records = list(records)
        self.moves += 1
        for record in records:
            self._places.pop(record, None)
        fits = self._group.gather_objects(_fit(records), "parameters that share their memory")
        shared = [r for r, *fit in zip(records, *fits, strict=True) if all(fit)]
        rest = [r for r, *fit in zip(records, *fits, strict=True) if not all(fit)]
        self._move_out(rest)
        if not shared:
            return rest
        offsets, total = offsets_of(r.components[0].nbytes for r in shared)
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

    def _move_out(self, guests: Sequence[Record]) -> None:
        """Those that have got memory of other records share memory of this worker's own with them from now on."""
        for segment in list(self._segments):
            spans = {r: span for r in guests if (span := _span(segment, r.components[0])) is not None}
            hosts = {
                record: (place.start, place.stop)
                for record, place in self._places.items()
                if place.segment is segment
                and any(start < place.stop and place.start < stop for start, stop in spans.values())
            }
            if spans:
                self._share_own({**hosts, **spans}, segment)
            for record in hosts:
                del self._places[record]

    def _share_own(self, spans: Mapping[Record, tuple[int, int]], segment: Segment) -> None:
        """Gives records that have bytes of a segment the same bytes of a copy."""
        first, end = min(start for start, _ in spans.values()), max(stop for _, stop in spans.values())
        with torch.no_grad(), raw():
            values = segment.private[first:end].clone().untyped_storage()
            for record, (start, _) in spans.items():
                if record.tensor is not None:
                    old = record.components[0].detach()
                    part = torch.empty(0, dtype=old.dtype)
                    part.set_(values, (start - first) // old.element_size(), old.size(), old.stride())
                    record.set_data(part)

    def moved_out(self, records: Sequence[Record]) -> list[Record]:
        """Those that got other memory, e.g. by ``module.double()``, or memory of another one."""
        return [r for r in records if self._has_moved(r)]

    def _has_moved(self, record: Record) -> bool:
        if (place := self._places.get(record)) is not None:
            return record.components[0].data_ptr() != place.address
        return any(_span(segment, record.components[0]) is not None for segment in self._segments)

    def written(self) -> Written:
        """What this worker wrote to its parameters since the last update."""
        return written_in(self._segments)

    def publish(self, written: Written) -> None:
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


def _span(segment: Segment, tensor: torch.Tensor) -> tuple[int, int] | None:
    """The bytes of a segment in which a tensor lies, as this worker sees it."""
    first = segment.private.data_ptr()
    start, stop = extent_of(tensor)
    return (start - first, stop - first) if first <= start < first + segment.nbytes else None


def _fit(records: Sequence[Record]) -> list[bool]:
    """Which may be moved: to the CPU's memory, and nothing but them looks at it where it is."""
    memory: dict[int, list[Record]] = {}
    with raw():
        for record in filter(_is_strided_parameter, records):
            memory.setdefault(_memory_of(record.components[0]), []).append(record)
        alone = {record for together in memory.values() if _lie_alone(together) for record in together}
    return [record in alone for record in records]


def _is_strided_parameter(record: Record) -> bool:
    values = record.components[0]
    if record.kind == "buffer" or values.layout is not torch.strided or values.numel() == 0:
        return False
    return torch.Tensor.device.__get__(values).type == "cpu"


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _lie_alone(records: Sequence[Record]) -> bool:
    """Whether no two have elements in common, as those of one file have not, and nothing else has their memory."""
    values = [r.components[0] for r in records]
    extents = sorted(map(extent_of, values))
    if any(start < stop for (_, stop), (start, _) in itertools.pairwise(extents)):
        return False
    # A variable is a tensor of its own beside the one with its values.
    shown = [r.tensor for r in records if r.tensor is not None and r.tensor is not r.components[0]]
    return torch_internals.lie_alone(*values, *(t for t in shown if _memory_of(t) == _memory_of(values[0])))


def dense_strides(like: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor without gaps that is laid out as ``like`` is (channels last, for one)."""
    return torch.empty_like(like, device="meta", memory_format=torch.preserve_format).stride()


def offsets_of(sizes: Iterable[int], alignment: int = _ALIGNMENT) -> tuple[list[int], int]:
    """Where things of so many bytes begin when they lie one after the other, and the bytes of all."""
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += size
        total += -total % alignment
    return offsets, total
