"""One replica per process: buckets are sent while backward still runs, as DDP does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from time import perf_counter

import torch

from tfstyle_dist.comm.group import Pending
from tfstyle_dist.core.devices import is_accelerator
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.cross_device_ops.collective import no_rows
from tfstyle_dist.gradients.one_pass import PassReducer
from tfstyle_dist.gradients.plan import Bucket
from tfstyle_dist.gradients.reducer import Slot
from tfstyle_dist.runtime.clocks import COMMUNICATION


class Lane:
    """A bucket's buffer, made when it is first needed, and what has happened to it in this pass."""

    def __init__(self, bucket: Bucket, slots: list[Slot]) -> None:
        self.bucket, self.slots = bucket, slots
        self.missing = len(slots)
        self.pending: Pending | None = None

    @cached_property
    def buffer(self) -> torch.Tensor:
        """The gradients one after the other, then the flags."""
        return self.bucket.new_buffer()

    @cached_property
    def flags(self) -> torch.Tensor:
        """For each parameter 1 where this worker has a gradient, else 0."""
        return self.buffer[self.bucket.numel :]

    @cached_property
    def views(self) -> list[torch.Tensor]:
        """The places of the gradients in the buffer."""
        return [
            self.buffer[o : o + r.components[0].numel()].view(r.components[0].shape)
            for o, r in zip(self.bucket.offsets, self.bucket.records, strict=True)
        ]


class StreamingReducer(PassReducer):
    """Reduces over the workers, bucket by bucket, overlapped with backward.

    Every worker sends all buckets in the same order in every backward pass, whatever parameters it used, so workers
    whose control flow differs still meet.
    """

    _travelling: Sequence[Pending] = ()
    _looked = 0.0

    def on_gradient(self, parameter: torch.Tensor, slot: Slot) -> None:
        """Copies the gradient into its bucket; sends what is complete."""
        if not self.enter(slot):
            return
        lane, place = self._places.get(id(slot), (None, 0))
        slot.ready = True
        if lane is None:  # sparse: handled at the end
            return
        if lane.pending is not None:
            raise RuntimeError(
                f"The gradient of {slot.record.describe()!r} came twice in one backward pass, the second time after "
                "it was sent. Use torch.utils.checkpoint with use_reentrant=False."
            )
        self._look()
        with self.worker.clocks[0].counting(COMMUNICATION):
            with torch.no_grad():
                self._fill(lane, place, slot)
            lane.missing -= 1
            if lane.missing == 0:
                self._send_complete()

    def _look(self) -> None:
        """Counts the time in which buckets travelled while backward went on; looks again with every gradient."""
        if not self._travelling:
            return
        clock, now = self.worker.clocks[0], perf_counter()
        clock.overlapped(now - self._looked)
        self._travelling, self._looked = [p for p in self._travelling if p.moving()], now

    # ---- one pass ---------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        for lane in self._lanes:
            lane.missing = len(lane.slots)
            lane.pending = None
            lane.flags.fill_(1.0)
            for slot in lane.slots:
                slot.ready = False
        self._next = 0
        self._travelling = ()

    def _build(self) -> None:
        plan = self.plan()
        self._lanes = [Lane(b, [self.slot(r, 0) for r in b.records]) for b in plan.buckets]
        self._places = {id(s): (lane, i) for lane in self._lanes for i, s in enumerate(lane.slots)}
        self._sparse = [(self.slot(r, 0), no_rows(r.components[0].detach())) for r in plan.sparse]
        self._unagreed, self._on_device = True, is_accelerator(self.worker.torch_device(0).type)
        sizes = ", ".join(f"{b.numel} x {b.dtype}" for b in plan.buckets)
        self._signature = f"of one backward pass ({sizes}; method {self.method!r})"

    def _fill(self, lane: Lane, place: int, slot: Slot) -> None:
        part = self.worker_part(slot)
        if part is None:
            lane.views[place].zero_()
        else:
            lane.views[place].copy_(part.to_dense() if part.is_sparse else part)

    def _send(self, lane: Lane) -> None:
        group = self.worker.group
        try:
            if self._unagreed:
                # Once for each plan: comparing every pass could cost as much as a small model's gradients.
                group.agree(self._signature, "gradients")
                self._unagreed = False
            name = f"gradients[{lane.bucket.index}]"
            lane.pending = group.all_reduce_async(lane.buffer, name, agreed=True, method=self.method)
            if self.worker.clocks[0].on and lane.pending.moving():
                self._looked = self._looked if self._travelling else perf_counter()
                self._travelling = (*self._travelling, lane.pending)
        except CollectiveMismatchError:
            self._active = False  # all workers know, and nobody goes on with this pass
            raise

    def _send_complete(self) -> None:
        while self._next < len(self._lanes) and self._lanes[self._next].missing == 0:
            self._send(self._lanes[self._next])
            self._next += 1

    def _abandon(self) -> None:
        """The others wait for the rest."""
        self._finish_sending()

    def _finish_sending(self) -> None:
        self._look()
        self._travelling = ()
        with torch.no_grad():
            for lane in self._lanes[self._next :]:
                for place, slot in enumerate(lane.slots):
                    if not slot.ready:
                        self._fill(lane, place, slot)
                        if not slot.dirty or slot.record.tensor is None:
                            lane.flags[place] = 0.0
                self._send(lane)
        self._next = len(self._lanes)
        if self._on_device:
            # Who waits for a device's library waits in the device's stream, which knows no limit and no name.
            self.worker.group.numbers(0, "end of gradients")
        for lane in self._lanes:
            assert lane.pending is not None
            lane.pending.wait()
        self._active = False

    def _finish(self) -> None:
        with self.worker.clocks[0].counting(COMMUNICATION):
            self._finish_all()

    def _finish_all(self) -> None:
        self._finish_sending()
        with torch.no_grad():
            unused = [s.record for lane in self._lanes for s in self._take(lane)]
            for slot, empty in self._sparse:
                self.reduce_sparse(slot, empty)
        self.say_unused(unused)

    def _take(self, lane: Lane) -> list[Slot]:
        """Puts the reduced gradients into ``.grad``; returns the slots that only other workers used."""
        used = None if all(s.ready for s in lane.slots) else lane.flags.tolist()
        elsewhere = []
        for place, slot in enumerate(lane.slots):
            if slot.record.tensor is None:
                continue  # gone here; the other workers needed our part all the same
            if used is not None and not (slot.ready or slot.dirty):
                if used[place] == 0:
                    continue  # nobody used it: the gradient stays what it was
                elsewhere.append(slot)
            self._store(slot, lane.views[place])
            self.settle(slot)
        return elsewhere

    def _store(self, slot: Slot, total: torch.Tensor) -> None:
        parameter = slot.record.components[0]
        grad, divisor = parameter.grad, self.divisor(slot.record)
        old = self.old_part(slot)
        if old is not None:
            total = total + old
        if grad is None or grad.is_sparse or grad.requires_grad:
            parameter.grad = grad = torch.empty_like(parameter, requires_grad=False)
        if divisor is None:
            grad.copy_(total)
        elif grad.dtype == total.dtype:
            torch.div(total, divisor, out=grad)
        else:
            grad.copy_(total / divisor)
