"""Ranks of one host over central storage: gradients are summed in shared memory, and their mean is kept there once.

A bucket is copied to shared memory as soon as backward has made it, and its gradients are freed; each worker sums a
slice of it over all workers. After the pass every worker's ``.grad`` is a view of the one result. A worker that changes
it in place, as ``clip_grad_norm_`` does, gets copies of the pages it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.cross_device_ops.collective import no_rows
from tfstyle_dist.gradients.one_pass import PassReducer
from tfstyle_dist.gradients.plan import Bucket, ReductionPlan
from tfstyle_dist.gradients.reducer import Slot
from tfstyle_dist.ops import aggregate
from tfstyle_dist.runtime.clocks import COMMUNICATION, WAIT
from tfstyle_dist.shm.pages import PAGE
from tfstyle_dist.shm.segment import Segment, open_segment
from tfstyle_dist.variables.shared_home import dense_strides

CHUNK_BYTES = 4 * 1024 * 1024
_SLICE = 16  # elements: slices of a chunk begin at whole cache lines


@dataclass(frozen=True)
class _Piece:
    """The part of a parameter's gradient that lies in a range of its bucket.

    Attributes:
        place: the parameter's number in the bucket.
        start: where the part begins in the bucket.
        stop: where it ends.
    """

    place: int
    start: int
    stop: int


class _Lane:
    """A bucket, its result, and what has happened to it in this pass."""

    def __init__(self, bucket: Bucket, slots: list[Slot], segment: Segment, offset: int) -> None:
        self.bucket, self.slots, self._segment = bucket, slots, segment
        self._bytes = slice(offset, offset + bucket.numel * bucket.dtype.itemsize)
        self.result = segment.shared[self._bytes].view(bucket.dtype)
        self.strides = [dense_strides(r.components[0].detach()) for r in bucket.records]
        self.ends = [o + r.components[0].numel() for o, r in zip(bucket.offsets, bucket.records, strict=True)]
        self.missing = len(slots)
        self.used = [True] * len(slots)

    def view(self, place: int) -> torch.Tensor:
        """This worker's view of one result."""
        flat = self._segment.private[self._bytes].view(self.bucket.dtype)
        shape = self.bucket.records[place].components[0].shape
        return flat[self.bucket.offsets[place] : self.ends[place]].as_strided(shape, self.strides[place])

    def refresh(self) -> None:
        """Drops what this worker wrote to its view of the last results."""
        self._segment.forget(self._bytes.start, self._bytes.stop)

    def pieces(self, start: int, stop: int) -> Iterator[_Piece]:
        """The parts of gradients in a range of the bucket."""
        for place, (offset, end) in enumerate(zip(self.bucket.offsets, self.ends, strict=True)):
            if offset < stop and end > start:
                yield _Piece(place, max(offset, start), min(end, stop))


class SharedReducer(PassReducer):
    """Reduces over the workers of one host, bucket by bucket, while backward goes on.

    Every worker sends all buckets in the same order in every backward pass, whatever parameters it used.
    """

    _turn = 0

    def on_gradient(self, parameter: torch.Tensor, slot: Slot) -> None:
        """Notes the gradient; sends what is complete."""
        if not self.enter(slot):
            return
        lane = self._places.get(id(slot))
        if lane is not None and not slot.ready:
            lane.missing -= 1
        elif lane is not None and self._lanes.index(lane) < self._next:
            raise RuntimeError(
                f"The gradient of {slot.record.describe()!r} came twice in one backward pass, the second time after "
                "it was sent. Use torch.utils.checkpoint with use_reentrant=False."
            )
        slot.ready = True
        if lane is not None and lane.missing == 0:
            self._send_complete()

    # ---- one pass ---------------------------------------------------------------------------------------------

    def _abandon(self) -> None:
        """The others may wait for the rest; what is in .grad is of the new pass already."""
        self._finish_sending(abandoned=True)

    def _reset(self) -> None:
        for lane in self._lanes:
            lane.missing = len(lane.slots)
            for slot in lane.slots:
                slot.ready = False
        self._next = 0

    def _build(self) -> None:
        plan, group = self.plan(), self.worker.group
        self._sparse = [(self.slot(r, 0), no_rows(r.components[0].detach())) for r in plan.sparse]
        offsets, total = _page_offsets(plan)
        most = max((len(b.records) for b in plan.buckets), default=0)
        group.numbers(0, f"gradients in shared memory: {total} bytes, {most} parameters in a bucket")
        results = open_segment(group, total, "gradients")
        self._lanes = [
            _Lane(b, [self.slot(r, 0) for r in b.records], results, o)
            for b, o in zip(plan.buckets, offsets, strict=True)
        ]
        self._places = {id(s): lane for lane in self._lanes for s in lane.slots}
        # Two turns: a worker that fills one may be met by others that still read the other.
        area = CHUNK_BYTES + most + -most % 64
        staging = open_segment(group, 2 * group.size * area, "contributions").shared
        rows = staging[: 2 * group.size * area].view(2, group.size, area)
        self._staging, self._flags = rows[:, :, :CHUNK_BYTES], rows[:, :, CHUNK_BYTES:]

    def _send_complete(self) -> None:
        while self._next < len(self._lanes) and self._lanes[self._next].missing == 0:
            self._send(self._lanes[self._next])
            self._next += 1

    def _send(self, lane: _Lane, abandoned: bool = False) -> None:
        with self.worker.clocks[0].counting(COMMUNICATION):
            self._send_whole(lane, abandoned)

    def _send_whole(self, lane: _Lane, abandoned: bool) -> None:
        ready = [(s.ready or s.dirty) and s.record.tensor is not None and not abandoned for s in lane.slots]
        try:
            with torch.no_grad():
                flats = [None if abandoned else self._flat(lane, place) for place in range(len(lane.slots))]
                step = CHUNK_BYTES // lane.bucket.dtype.itemsize
                for start in range(0, max(lane.bucket.numel, 1), step):
                    self._send_chunk(lane, flats, ready, start, min(start + step, lane.bucket.numel))
        except CollectiveMismatchError:
            self._active = False  # all workers know, and nobody goes on with this pass
            raise
        if abandoned:
            return
        for slot, used in zip(lane.slots, lane.used, strict=True):
            if slot.record.tensor is None:
                continue
            component = slot.record.components[0]
            if used:
                old = self.old_part(slot)
                slot.before = old if old is None or old is slot.before else old.clone()
                component.grad = None
            elif component.grad is not None:  # nobody used it: the gradient stays what it was
                component.grad = component.grad.clone()

    def _flat(self, lane: _Lane, place: int) -> torch.Tensor | None:
        """What one parameter adds, all elements in the order in which the parameter lies in memory."""
        part = self.contribution(lane.slots[place])
        if part is None:
            return None
        part = part.detach().to_dense() if part.is_sparse else part.detach()
        if part.stride() != lane.strides[place]:
            laid_out = torch.empty_strided(part.shape, lane.strides[place], dtype=part.dtype)
            part = laid_out.copy_(part)
        return part.as_strided((part.numel(),), (1,))

    def _send_chunk(
        self, lane: _Lane, flats: list[torch.Tensor | None], ready: list[bool], start: int, stop: int
    ) -> None:
        group, bucket = self.worker.group, lane.bucket
        self._turn = 1 - self._turn
        slots = self._staging[self._turn].view(bucket.dtype)
        flags = self._flags[self._turn]
        for piece in lane.pieces(start, stop):
            target = slots[group.rank, piece.start - start : piece.stop - start]
            flat, offset = flats[piece.place], bucket.offsets[piece.place]
            if flat is None:
                target.zero_()
            else:
                target.copy_(flat[piece.start - offset : piece.stop - offset])
        flags[group.rank, : len(ready)] = torch.tensor(ready, dtype=torch.uint8)
        number = int(not all(ready))
        with self.worker.clocks[0].counting(WAIT):
            numbers = group.numbers(number, f"gradients[{bucket.index}] ({bucket.numel} x {bucket.dtype})")
        if any(numbers):
            lane.used = [bool(u) for u in flags[:, : len(ready)].any(0).tolist()]
        else:
            lane.used = [True] * len(ready)
        count = stop - start
        low, high = (start + _cut(count, group.size, r) for r in (group.rank, group.rank + 1))
        for piece, divisor in self._sums(lane, low, high):
            parts = [slots[r, piece.start - start : piece.stop - start] for r in range(group.size)]
            aggregate(parts, self.method, out=lane.result[piece.start : piece.stop], divisor=divisor)

    def _sums(self, lane: _Lane, start: int, stop: int) -> list[tuple[_Piece, int | None]]:
        """The sums to take in a range: one, unless its parameters differ in their divisor or in being used."""
        if stop <= start:
            return []
        divisors = [self.divisor(s.record) for s in lane.slots]
        if all(lane.used) and all(d == divisors[0] for d in divisors):
            return [(_Piece(0, start, stop), divisors[0])]
        return [(p, divisors[p.place]) for p in lane.pieces(start, stop) if lane.used[p.place]]

    def _finish_sending(self, abandoned: bool = False) -> None:
        for lane in self._lanes[self._next :]:
            self._send(lane, abandoned)
        self._next = len(self._lanes)
        with self.worker.clocks[0].counting(WAIT):
            self.worker.group.numbers(0, "end of gradients")
        self._active = False

    def _finish(self) -> None:
        self._finish_sending()
        with self.worker.clocks[0].counting(COMMUNICATION):
            self._take_results()

    def _take_results(self) -> None:
        elsewhere = []
        with torch.no_grad():
            for lane in self._lanes:
                lane.refresh()
                for place, slot in enumerate(lane.slots):
                    if lane.used[place] and slot.record.tensor is not None:
                        if not (slot.ready or slot.dirty):
                            elsewhere.append(slot.record)
                        self._store(slot, lane.view(place))
                        self.settle(slot)
            for slot, empty in self._sparse:
                self.reduce_sparse(slot, empty)
        self.say_unused(elsewhere)

    def _store(self, slot: Slot, total: torch.Tensor) -> None:
        parameter = slot.record.components[0]
        if slot.before is not None and self.divisor(slot.record) is None:
            total.add_(slot.before)
        parameter.grad = total if total.dtype == parameter.dtype else total.to(parameter.dtype)


def _page_offsets(plan: ReductionPlan) -> tuple[list[int], int]:
    """Where each bucket's result begins: on a page of its own, so that it can be dropped alone."""
    offsets, total = [], 0
    for bucket in plan.buckets:
        offsets.append(total)
        total += bucket.numel * bucket.dtype.itemsize
        total += -total % PAGE
    return offsets, total


def _cut(count: int, size: int, rank: int) -> int:
    """Where a rank's slice of ``count`` elements begins."""
    return count if rank == size else count * rank // size // _SLICE * _SLICE
