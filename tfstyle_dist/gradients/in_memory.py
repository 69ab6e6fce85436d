"""One replica per process, all on one host: gradients are summed in shared memory when backward is over.

The processors are busy with backward until then, so there is nothing to gain by sending early; at its end each gradient
is read, summed, divided and written where it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from tfstyle_dist.comm.group import Done
from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.gradients.pieces import GradientPieces
from tfstyle_dist.gradients.plan import Bucket
from tfstyle_dist.gradients.reducer import Slot
from tfstyle_dist.gradients.streaming import Lane, StreamingReducer
from tfstyle_dist.runtime.clocks import COMMUNICATION, WAIT

_MOST_LAYOUTS = 16


class _Layout:
    """What is reduced when all workers used the same parameters."""

    def __init__(self, lanes: Sequence[Lane], used: frozenset[int], num_replicas: int) -> None:
        self.parts: list[tuple[list[Slot], Bucket, GradientPieces]] = []
        for lane in lanes:
            slots = [s for s in lane.slots if id(s) in used]
            if slots:
                shapes = [s.record.components[0].shape for s in slots]
                bucket = lane.bucket.only([s.record for s in slots])
                self.parts.append((slots, bucket, GradientPieces(shapes, bucket.dtype, num_replicas)))


class InMemoryReducer(StreamingReducer):
    """Reduces over the workers of one host at the end of backward.

    The workers first tell each other which parameters they used. Mostly all used the same, and only those are summed;
    else all are, as in ``StreamingReducer``.
    """

    def on_gradient(self, parameter: torch.Tensor, slot: Slot) -> None:
        """Notes the gradient."""
        if self.enter(slot):
            slot.ready = True

    def _build(self) -> None:
        super()._build()
        self._all = [s for lane in self._lanes for s in lane.slots] + [s for s, _ in self._sparse]
        self._layouts: dict[bytes, _Layout] = {}

    def _reset(self) -> None:
        for slot in self._all:
            slot.ready = False

    def _abandon(self) -> None:
        """The pass did not come to its end: the others get our part, and its result is nobody's."""
        with torch.no_grad():
            self._exchange(keep=False)

    def _finish(self) -> None:
        with self.worker.clocks[0].counting(COMMUNICATION), torch.no_grad():
            self._exchange(keep=True)

    def _exchange(self, keep: bool) -> None:
        self._active = False
        used = bytes([s.ready or s.dirty for s in self._all])
        number = int.from_bytes(hashlib.blake2b(used, digest_size=7).digest(), "big")
        with self.worker.clocks[0].counting(WAIT):
            numbers = self.worker.group.numbers(number, f"gradients {self._signature}")
        if len(set(numbers)) == 1:
            for part in self._layout(used).parts:
                self._reduce_part(*part, keep=keep)
            sparse = [(s, empty) for s, empty in self._sparse if s.ready or s.dirty]
            unused = []
        else:
            unused = self._reduce_all(keep)
            sparse = self._sparse
        if keep:
            for slot, empty in sparse:
                self.reduce_sparse(slot, empty)
            self.say_unused([s.record for s in unused])

    def _layout(self, used: bytes) -> _Layout:
        layout = self._layouts.get(used)
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            members = frozenset(id(s) for s, flag in zip(self._all, used, strict=True) if flag)
            layout = self._layouts[used] = _Layout(self._lanes, members, self.worker.num_replicas)
        return layout

    def _reduce_part(self, slots: list[Slot], bucket: Bucket, pieces: GradientPieces, keep: bool) -> None:
        name = f"gradients[{bucket.index}]"
        grads = _plain_gradients(slots) if keep and self.own_sum is None else None
        if grads is not None:
            pieces.grads = grads
            self.worker.group.all_reduce_flat(pieces, name, self.method)
            pieces.grads = ()
            for slot in slots:
                self.settle(slot)
            return
        lane = Lane(bucket, slots)
        for place, slot in enumerate(slots):
            self._fill(lane, place, slot)
        self.worker.group.all_reduce(lane.buffer[: bucket.numel], name, self.method)
        if keep:
            for place, slot in enumerate(slots):
                if slot.record.tensor is not None:
                    self._store(slot, lane.views[place])
                self.settle(slot)

    def _reduce_all(self, keep: bool) -> list[Slot]:
        """Every parameter, with flags that tell who used it."""
        elsewhere = []
        for lane in (Lane(old.bucket, old.slots) for old in self._lanes):
            lane.flags.fill_(1.0)
            for place, slot in enumerate(lane.slots):
                self._fill(lane, place, slot)
                if not (slot.ready or slot.dirty) or slot.record.tensor is None:
                    lane.flags[place] = 0.0
            lane.pending = Done()
            self.worker.group.all_reduce(lane.buffer, f"gradients[{lane.bucket.index}]", self.method)
            if keep:
                elsewhere += self._take(lane)
        return elsewhere


def _plain_gradients(slots: Sequence[Slot]) -> list[torch.Tensor] | None:
    """The gradients if they can be summed where they are: all there, dense, averaged, and of no graph."""
    grads = []
    for slot in slots:
        record = slot.record
        grad = record.components[0].grad
        if (
            grad is None
            or grad.layout is not torch.strided
            or grad.requires_grad
            or not grad.is_contiguous()
            or slot.watches_before
            or record.tensor is None
            or (record.policy is not None and record.policy.scale is not ReduceOp.MEAN)
        ):
            return None
        grads.append(grad)
    return grads
