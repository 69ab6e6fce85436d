"""Ranks of one host over central storage: gradients are summed in shared memory, and their mean is kept there once.

A bucket is copied to shared memory as soon as backward has made it, and its gradients are freed; each worker sums a
slice of it over all workers. After the pass every worker's ``.grad`` is a view of the one result. A worker that changes
it in place, as ``clip_grad_norm_`` does, gets copies of the pages it writes. A worker whose program keeps a gradient
beyond the next pass has gradients of its own from then on.
"""

from __future__ import annotations

import torch

from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.cross_device_ops.collective import no_rows
from tfstyle_dist.gradients.backward_pass import PassReducer
from tfstyle_dist.gradients.exchanges.shared_results import SharedBucket, Span
from tfstyle_dist.gradients.reducer import GradientState
from tfstyle_dist.ops import aggregate
from tfstyle_dist.runtime.clocks import COMMUNICATION, WAIT
from tfstyle_dist.shm import pages
from tfstyle_dist.shm.segment import open_segment
from tfstyle_dist.variables.central.shared_home import offsets_of

CHUNK_BYTES = 4 * 1024 * 1024
_SLICE = 16  # elements: slices of a chunk begin at whole cache lines


class SharedReducer(PassReducer):
    """Reduces over the workers of one host, bucket by bucket, while backward goes on.

    Every worker sends all buckets in the same order in every backward pass, whatever parameters it used.
    """

    _turn = 0
    _first = True
    _hooked = False
    _comes_again = False  # a gradient has come twice in one pass: buckets are kept until the end from then on

    def on_gradient(self, parameter: torch.Tensor, state: GradientState) -> None:
        """Notes the gradient; sends what is complete."""
        if not self.enter(state):
            return
        filling = self._positions.get(id(state))
        if filling is not None and not state.ready:
            filling.missing -= 1
        elif filling is not None and self._filling_buckets.index(filling) < self._next:
            raise RuntimeError(
                f"The gradient of {state.record.describe()!r} came twice in one backward pass, the second time after "
                "it was sent. Use torch.utils.checkpoint with use_reentrant=False."
            )
        self._comes_again |= state.ready
        state.ready = True
        kept = self._first or self.meets_in_backward or self._hooked or self._comes_again
        if filling is not None and filling.missing == 0 and not kept:
            self._send_complete()

    # ---- one pass ---------------------------------------------------------------------------------------------

    def _abort(self) -> None:
        """The others may wait for the rest; what is in .grad is of the new pass already."""
        self._finish_sending(aborted=True)
        for state, empty in self._sparse:
            self.reduce_sparse(state, empty, keep=False)

    def _reset(self) -> None:
        # Hooks of the program come after ours, and look at gradients that are freed when they are sent.
        self._hooked = any(filling.has_hooks() for filling in self._filling_buckets)
        for filling in self._filling_buckets:
            filling.missing = len(filling.states)
            for state in filling.states:
                state.ready = False
        self._next = 0

    def _build(self) -> None:
        plan, group = self.plan(), self.worker.group
        self._sparse = [(self.state(r, 0), no_rows(r.components[0].detach())) for r in plan.sparse]
        # Each result begins on a page of its own, so that it can be dropped alone.
        offsets, total = offsets_of((b.numel * b.dtype.itemsize for b in plan.buckets), pages.PAGE)
        most = max((len(b.records) for b in plan.buckets), default=0)
        group.numbers(0, f"gradients in shared memory: {total} bytes, {most} parameters in a bucket")
        results = open_segment(group, total, "gradients")
        self._filling_buckets = [
            SharedBucket(b, [self.state(r, 0) for r in b.records], results, o)
            for b, o in zip(plan.buckets, offsets, strict=True)
        ]
        self._positions = {id(s): filling for filling in self._filling_buckets for s in filling.states}
        # Two turns: a worker that fills one may be met by others that still read the other.
        area = CHUNK_BYTES + most + -most % 64
        staging = open_segment(group, 2 * group.size * area, "contributions").shared
        rows = staging[: 2 * group.size * area].view(2, group.size, area)
        self._staging, self._flags = rows[:, :, :CHUNK_BYTES], rows[:, :, CHUNK_BYTES:]

    def _send_complete(self) -> None:
        while self._next < len(self._filling_buckets) and self._filling_buckets[self._next].missing == 0:
            self._send(self._filling_buckets[self._next])
            self._next += 1

    def _send(self, filling: SharedBucket, aborted: bool = False) -> None:
        with self.worker.clocks[0].counting(COMMUNICATION):
            self._send_whole(filling, aborted)

    def _send_whole(self, filling: SharedBucket, aborted: bool) -> None:
        filling.keep_views()
        ready = [(s.ready or s.dirty) and s.record.tensor is not None and not aborted for s in filling.states]
        try:
            with torch.no_grad():
                flats = [None if aborted else self._flat(filling, position) for position in range(len(filling.states))]
                step = CHUNK_BYTES // filling.bucket.dtype.itemsize
                for start in range(0, max(filling.bucket.numel, 1), step):
                    self._send_chunk(filling, flats, ready, start, min(start + step, filling.bucket.numel))
        except CollectiveMismatchError:
            self._active = False  # all workers know, and nobody goes on with this pass
            raise
        if aborted:
            return
        flats.clear()  # they share the memory of the gradients
        for position, (state, used) in enumerate(zip(filling.states, filling.used, strict=True)):
            if state.record.tensor is None:
                continue
            if used:
                old = self.old_part(state)
                state.before = old if old is None or old is state.before else old.clone()
                filling.drop(position)
            else:
                filling.keep_unused(position)

    def _flat(self, filling: SharedBucket, position: int) -> torch.Tensor | None:
        """What one parameter adds, all elements in the order in which the parameter lies in memory."""
        part = self.contribution(filling.states[position])
        if part is None:
            return None
        if part.is_sparse:
            name = filling.states[position].record.describe()
            warn_once(
                f"dense {name}",
                f"The gradient of {name!r} is sparse, and ranks that share one copy of the parameters sum it as a "
                "dense one, which SparseAdam refuses: they know it before only of a torch.nn.Embedding or EmbeddingBag "
                "with sparse=True. Keep the table in such a module, or use MirroredStrategy.",
            )
        part = part.detach().to_dense() if part.is_sparse else part.detach()
        if part.stride() != filling.strides[position]:
            laid_out = torch.empty_strided(part.shape, filling.strides[position], dtype=part.dtype)
            part = laid_out.copy_(part)
        return part.as_strided((part.numel(),), (1,))

    def _send_chunk(
        self, filling: SharedBucket, flats: list[torch.Tensor | None], ready: list[bool], start: int, stop: int
    ) -> None:
        group, bucket = self.worker.group, filling.bucket
        self._turn = 1 - self._turn
        states = self._staging[self._turn].view(bucket.dtype)
        flags = self._flags[self._turn]
        for span in filling.spans(start, stop):
            target = states[group.rank, span.start - start : span.stop - start]
            flat, offset = flats[span.position], bucket.offsets[span.position]
            if flat is None:
                target.zero_()
            else:
                target.copy_(flat[span.start - offset : span.stop - offset])
        flags[group.rank, : len(ready)] = torch.tensor(ready, dtype=torch.uint8)
        number = int(not all(ready))
        with self.worker.clocks[0].counting(WAIT):
            numbers = group.numbers(number, f"gradients[{bucket.index}] ({bucket.numel} x {bucket.dtype})")
        if any(numbers):
            filling.used = [bool(u) for u in flags[:, : len(ready)].any(0).tolist()]
        else:
            filling.used = [True] * len(ready)
        count = stop - start
        low, high = (start + _cut(count, group.size, r) for r in (group.rank, group.rank + 1))
        for span, divisor in self._sums(filling, low, high):
            parts = [states[r, span.start - start : span.stop - start] for r in range(group.size)]
            aggregate(parts, self.method, out=filling.result[span.start : span.stop], divisor=divisor)

    def _sums(self, filling: SharedBucket, start: int, stop: int) -> list[tuple[Span, int | None]]:
        """The sums to take in a range: one, unless its parameters differ in their divisor or in being used."""
        if stop <= start:
            return []
        divisors = [self.divisor(s.record) for s in filling.states]
        if all(filling.used) and all(d == divisors[0] for d in divisors):
            return [(Span(0, start, stop), divisors[0])]
        return [(p, divisors[p.position]) for p in filling.spans(start, stop) if filling.used[p.position]]

    def _finish_sending(self, aborted: bool = False) -> None:
        for filling in self._filling_buckets[self._next :]:
            self._send(filling, aborted)
        self._next = len(self._filling_buckets)
        with self.worker.clocks[0].counting(WAIT):
            met = self.worker.group.numbers(int(self.meets_in_backward), "end of gradients")
        self.meets_in_backward, self._first, self._active = any(met), False, False

    def _finish(self) -> None:
        first = self._first
        self._finish_sending()
        if first:  # nothing was freed during the pass
            pages.trim_heap()
        with self.worker.clocks[0].counting(COMMUNICATION):
            self._take_results()

    def _take_results(self) -> None:
        elsewhere = []
        with torch.no_grad():
            for filling in self._filling_buckets:
                filling.refresh()
                for position, state in enumerate(filling.states):
                    if filling.used[position] and state.record.tensor is not None:
                        if not (state.ready or state.dirty):
                            elsewhere.append(state.record)
                        self._store(state, filling.gradient(position))
                        self.settle(state)
            for state, empty in self._sparse:
                self.reduce_sparse(state, empty)
        self.say_unused(elsewhere)

    def _store(self, state: GradientState, total: torch.Tensor) -> None:
        parameter = state.record.components[0]
        if state.before is not None and self.divisor(state.record) is None:
            total.add_(state.before)
        grad = parameter.grad
        if grad is None or grad.is_sparse:
            parameter.grad = total.to(parameter.dtype)
        elif grad is not total:
            grad.copy_(total)


def _cut(count: int, size: int, rank: int) -> int:
    """Where a rank's slice of ``count`` elements begins."""
    return count if rank == size else count * rank // size // _SLICE * _SLICE
