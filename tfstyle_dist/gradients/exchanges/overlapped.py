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
from tfstyle_dist.gradients.backward_pass import PassReducer
from tfstyle_dist.gradients.buckets import ROWS, Bucket, has_rows, only_rows
from tfstyle_dist.gradients.reducer import GradientState, has_further_hooks
from tfstyle_dist.runtime.clocks import COMMUNICATION


class FillingBucket:
    """A bucket's buffer, made when it is first needed, and what has happened to it in this pass."""

    def __init__(self, bucket: Bucket, states: list[GradientState]) -> None:
        self.bucket, self.states = bucket, states
        self.missing = len(states)
        self.late: set[int] = set()  # positions that are copied when the pass is over
        self.rows: set[int] = set()  # positions of sparse gradients
        self.pending: Pending | None = None

    @cached_property
    def buffer(self) -> torch.Tensor:
        """The gradients one after the other, then the flags."""
        return self.bucket.new_buffer()

    @cached_property
    def flags(self) -> torch.Tensor:
        """For each parameter what this worker has of it: see ``Bucket``."""
        return self.buffer[self.bucket.numel :]

    def note_rows(self, position: int, sparse: bool) -> None:
        """Notes whether the gradient that was copied is sparse; it may be the second one of a pass."""
        if sparse:
            self.rows.add(position)
        elif self.rows:
            self.rows.discard(position)

    def flag_rows(self) -> None:
        """Tells the others of them, before the buffer is sent."""
        for position in self.rows:
            self.flags[position] = ROWS

    @cached_property
    def views(self) -> list[torch.Tensor]:
        """The positions of the gradients in the buffer."""
        return [
            self.buffer[offset : offset + shape.numel()].view(shape)
            for offset, (shape, _) in zip(self.bucket.offsets, self.bucket.kinds, strict=True)
        ]


class StreamingReducer(PassReducer):
    """Reduces over the workers, bucket by bucket, overlapped with backward.

    Every worker sends all buckets in the same order in every backward pass, whatever parameters it used, so workers
    whose control flow differs still meet. Where the replicas meet in backward themselves, and in the first pass, which
    shows whether they do, all buckets are sent at its end.
    """

    _travelling: Sequence[Pending] = ()
    _looked = 0.0
    _comes_again = False  # a gradient has come twice in one pass: buckets are kept until the end from then on

    def on_gradient(self, parameter: torch.Tensor, state: GradientState) -> None:
        """Copies the gradient into its bucket; sends what is complete."""
        if not self.enter(state):
            return
        filling, position = self._positions.get(id(state), (None, 0))
        again, state.ready = state.ready, True
        if filling is None:  # sparse: handled at the end
            return
        if filling.pending is not None:
            raise RuntimeError(
                f"The gradient of {state.record.describe()!r} came twice in one backward pass, the second time after "
                "it was sent. Use torch.utils.checkpoint with use_reentrant=False."
            )
        self._comes_again |= again
        if has_further_hooks(parameter):
            filling.late.add(position)
            return
        self._look()
        with self.worker.clocks[0].counting(COMMUNICATION):
            with torch.no_grad():
                self._fill(filling, position, state)
            filling.missing -= not again
            if filling.missing == 0 and not (self._unagreed or self.meets_in_backward or self._comes_again):
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
        for filling in self._filling_buckets:
            filling.missing = len(filling.states)
            filling.pending = None
            filling.late.clear()
            filling.rows.clear()
            filling.flags.fill_(1.0)
            for state in filling.states:
                state.ready = False
        self._next = 0
        self._travelling = ()

    def _build(self) -> None:
        plan = self.plan()
        self._filling_buckets = [FillingBucket(b, [self.state(r, 0) for r in b.records]) for b in plan.buckets]
        self._positions = {
            id(s): (filling, i) for filling in self._filling_buckets for i, s in enumerate(filling.states)
        }
        self._sparse = [(self.state(r, 0), no_rows(r.components[0].detach())) for r in plan.sparse]
        self._unagreed, self._on_device = True, is_accelerator(self.worker.torch_device(0).type)
        sizes = ", ".join(f"{b.numel} x {b.dtype}" for b in plan.buckets)
        self._signature = f"of one backward pass ({sizes}; method {self.method!r})"

    def _fill(self, filling: FillingBucket, position: int, state: GradientState) -> None:
        part = self.worker_part(state)
        if part is None:
            filling.views[position].zero_()
        else:
            filling.views[position].copy_(part.to_dense() if part.is_sparse else part)
        filling.note_rows(position, part is not None and has_rows(part))

    def _send(self, filling: FillingBucket) -> None:
        group = self.worker.group
        try:
            if self._unagreed:
                # Once for each plan: comparing every pass could cost as much as a small model's gradients.
                group.agree(self._signature, "gradients")
                self._unagreed = False
            name = f"gradients[{filling.bucket.index}]"
            filling.flag_rows()
            filling.pending = group.all_reduce_async(filling.buffer, name, agreed=True, method=self.method)
            if self.worker.clocks[0].on and filling.pending.moving():
                self._looked = self._looked if self._travelling else perf_counter()
                self._travelling = (*self._travelling, filling.pending)
        except CollectiveMismatchError:
            self._active = False  # all workers know, and nobody goes on with this pass
            raise

    def _send_complete(self) -> None:
        while self._next < len(self._filling_buckets) and self._filling_buckets[self._next].missing == 0:
            self._send(self._filling_buckets[self._next])
            self._next += 1

    def _abort(self) -> None:
        """The others wait for the rest."""
        self._finish_sending()
        for filling in self._filling_buckets:
            self._take(filling, keep=False)
        for state, empty in self._sparse:
            self.reduce_sparse(state, empty, keep=False)

    def _finish_sending(self) -> None:
        self._look()
        self._travelling = ()
        with torch.no_grad():
            for filling in self._filling_buckets[self._next :]:
                for position, state in enumerate(filling.states):
                    if not state.ready or position in filling.late:
                        self._fill(filling, position, state)
                    if not state.ready and not state.dirty:
                        filling.flags[position] = 0.0
                        filling.note_rows(position, False)
                self._send(filling)
        self._next = len(self._filling_buckets)
        if self._on_device:
            # Who waits for a device's library waits in the device's stream, which knows no limit and no name.
            met = self.worker.group.numbers(int(self.meets_in_backward), "end of gradients")
            self.meets_in_backward = any(met)
        for filling in self._filling_buckets:
            assert filling.pending is not None
            filling.pending.wait()
        self._active = False

    def _finish(self) -> None:
        with self.worker.clocks[0].counting(COMMUNICATION):
            self._finish_sending()
            with torch.no_grad():
                unused = [s.record for filling in self._filling_buckets for s in self._take(filling)]
                for state, empty in self._sparse:
                    self.reduce_sparse(state, empty)
            self.say_unused(unused)

    def _take(self, filling: FillingBucket, keep: bool = True) -> list[GradientState]:
        """Puts the reduced gradients into ``.grad``, if they are kept; returns the states that only others used."""
        used = None if not filling.rows and all(s.ready for s in filling.states) else filling.flags.tolist()
        elsewhere = []
        for position, state in enumerate(filling.states):
            if used is not None and only_rows(used[position]):
                self.reduce_sparse(state, filling.bucket.no_rows(position), keep)
                continue
            if state.record.tensor is None or not keep:
                continue  # gone here; the other workers needed our part all the same
            if used is not None and not (state.ready or state.dirty):
                if used[position] == 0:
                    continue  # nobody used it: the gradient stays what it was
                elsewhere.append(state)
            self._store(state, filling.views[position])
            self.settle(state)
        return elsewhere

    def _store(self, state: GradientState, total: torch.Tensor) -> None:
        parameter = state.record.components[0]
        grad, divisor = parameter.grad, self.divisor(state.record)
        old = self.old_part(state)
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
