"""One replica per process, all on one host: gradients are summed in shared memory when backward is over.

The processors are busy with backward until then, so there is nothing to gain by sending early; at its end each gradient
is read, summed, divided and written where it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from tfstyle_dist.comm.collectives.flat import BufferView, Flat
from tfstyle_dist.comm.group import Done
from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.cross_device_ops.collective import no_rows
from tfstyle_dist.gradients.bucket_views import BucketViews
from tfstyle_dist.gradients.buckets import Bucket, has_rows
from tfstyle_dist.gradients.exchanges.overlapped import FillingBucket, StreamingReducer
from tfstyle_dist.gradients.reducer import GradientState
from tfstyle_dist.runtime.clocks import COMMUNICATION, COMPUTE, WAIT

_MOST_LAYOUTS = 16
_ROWS = 2  # of the kinds of what a copy has

_ASKED_FIRST = 100  # passes after one in which the workers used different parameters
_Part = tuple[list[GradientState], Bucket, BucketViews]


class _Layout:
    """What is reduced when all workers used the same parameters.

    Attributes:
        variant: a number that stands for these parameters, and for which of them have rows.
        parts: the buckets of which some are used.
        rows: those of their parameters whose gradients are sparse, in no part, and for each a gradient without rows.
    """

    def __init__(
        self, filling_buckets: Sequence[FillingBucket], used: frozenset[int], num_replicas: int, variant: int
    ) -> None:
        self.variant = variant
        self.rows: list[tuple[GradientState, torch.Tensor]] = []
        self.parts: list[_Part] = []
        for filling in filling_buckets:
            states = [s for s in filling.states if id(s) in used]
            if states:
                shapes = [s.record.components[0].shape for s in states]
                bucket = filling.bucket.only([s.record for s in states])
                self.parts.append((states, bucket, BucketViews(shapes, bucket.dtype, num_replicas)))


class InMemoryReducer(StreamingReducer):
    """Reduces over the workers of one host at the end of backward.

    Mostly all workers used the same parameters, and only those are summed; where they meet for the first bucket, they
    see whether it is so. Else all parameters are summed, as in ``StreamingReducer``; and for a while the workers tell
    each other what they used before they sum anything, since it may differ again.
    """

    _asked_first = 0

    def on_gradient(self, parameter: torch.Tensor, state: GradientState) -> None:
        """Notes the gradient."""
        if self.enter(state):
            state.ready = True

    def _build(self) -> None:
        super()._build()
        self._all = [s for filling in self._filling_buckets for s in filling.states] + [s for s, _ in self._sparse]
        self._layouts: dict[bytes, _Layout] = {}
        self._call = f"gradients {self._signature}"
        buckets = [filling.bucket for filling in self._filling_buckets]
        self._in_memory = all(self.worker.group.shares_memory(b.dtype, b.device) for b in buckets)

    def _reset(self) -> None:
        for state in self._all:
            state.ready = False

    def _abort(self) -> None:
        """The pass did not come to its end: the others get our part, and its result is nobody's."""
        with torch.no_grad():
            self._exchange(keep=False)

    def _finish(self) -> None:
        with self.worker.clocks[0].counting(COMMUNICATION), torch.no_grad():
            self._exchange(keep=True)

    def _exchange(self, keep: bool) -> None:
        self._active = False
        layout = self._layout(bytes(map(_kind, self._all)))
        parts = self._meet(layout, keep)
        if parts is not None:
            for part in parts:
                self._reduce_part(*part, keep=keep)
            sparse = [(s, empty) for s, empty in self._sparse if _kind(s)]
            sparse += layout.rows
            unused = []
        else:
            unused = self._reduce_all(keep)
            sparse = self._sparse
        for state, empty in sparse:
            self.reduce_sparse(state, empty, keep)
        self.say_unused([s.record for s in unused])

    def _meet(self, layout: _Layout, keep: bool) -> Sequence[_Part] | None:
        """What is left to reduce if all workers used the same parameters; ``None`` if they did not."""
        group, clock = self.worker.group, self.worker.clocks[0]
        before, left = group.waited, layout.parts
        if self._asked_first or not self._in_memory:
            alike = len(set(group.numbers(layout.variant, self._call))) == 1
            self._asked_first = max(0, self._asked_first - 1)
        elif left:
            alike = self._reduce_part(*left[0], keep=keep, variant=layout.variant)
            left = left[1:]
        else:
            nothing = BufferView(torch.empty(0, device="cpu"))
            alike = group.all_reduce_variant(nothing, "gradients", self.method, layout.variant, self._call)
        clock.recount(group.waited - before, COMMUNICATION if keep else COMPUTE, WAIT)
        if alike:
            return left
        self._asked_first = _ASKED_FIRST
        return None

    def _layout(self, used: bytes) -> _Layout:
        layout = self._layouts.get(used)
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            rows = [s for s, kind in zip(self._all, used, strict=True) if kind == _ROWS and id(s) in self._positions]
            members = frozenset(id(s) for s, kind in zip(self._all, used, strict=True) if kind).difference(
                map(id, rows)
            )
            variant = int.from_bytes(hashlib.blake2b(used, digest_size=7).digest(), "big")
            layout = _Layout(self._filling_buckets, members, self.worker.num_replicas, variant)
            layout.rows = [(s, no_rows(s.record.components[0].detach())) for s in rows]
            self._layouts[used] = layout
        return layout

    def _reduce_part(
        self, states: list[GradientState], bucket: Bucket, spans: BucketViews, keep: bool, variant: int | None = None
    ) -> bool:
        """With a variant: whether all workers gave the same one; else nothing was reduced."""
        grads = _plain_gradients(states) if keep and self.own_sum is None else None
        if grads is not None:
            spans.grads = grads
            alike = self._sum(spans, bucket, variant)
            spans.grads = ()
            if alike:
                for state in states:
                    self.settle(state)
            return alike
        filling = FillingBucket(bucket, states)
        for position, state in enumerate(states):
            self._fill(filling, position, state)
        alike = self._sum(filling.buffer[: bucket.numel], bucket, variant)
        if keep and alike:
            for position, state in enumerate(states):
                if state.record.tensor is not None:
                    self._store(state, filling.views[position])
                self.settle(state)
        return alike

    def _sum(self, values: Flat | torch.Tensor, bucket: Bucket, variant: int | None) -> bool:
        group, name = self.worker.group, f"gradients[{bucket.index}]"
        if variant is not None:
            flat = BufferView(values) if isinstance(values, torch.Tensor) else values
            return group.all_reduce_variant(flat, name, self.method, variant, self._call)
        if isinstance(values, torch.Tensor):
            group.all_reduce(values, name, self.method)
        else:
            group.all_reduce_flat(values, name, self.method)
        return True

    def _reduce_all(self, keep: bool) -> list[GradientState]:
        """Every parameter, with flags that tell who used it."""
        elsewhere = []
        for filling in (FillingBucket(old.bucket, old.states) for old in self._filling_buckets):
            filling.flags.fill_(1.0)
            for position, state in enumerate(filling.states):
                self._fill(filling, position, state)
                if not (state.ready or state.dirty) or state.record.tensor is None:
                    filling.flags[position] = 0.0
                    filling.note_rows(position, False)
            filling.pending = Done()
            filling.flag_rows()
            self.worker.group.all_reduce(filling.buffer, f"gradients[{filling.bucket.index}]", self.method)
            elsewhere += self._take(filling, keep)
        return elsewhere


def _kind(state: GradientState) -> int:
    """Whether a copy has something for the others, and whether that is rows."""
    if not (state.ready or state.dirty) or state.record.tensor is None:  # one that is gone has nothing
        return 0
    grad = state.record.components[0].grad
    return _ROWS if grad is not None and has_rows(grad) else 1


def _plain_gradients(states: Sequence[GradientState]) -> list[torch.Tensor] | None:
    """The gradients if they can be summed where they are: all there, dense, averaged, and of no graph."""
    grads = []
    for state in states:
        record = state.record
        grad = record.components[0].grad
        if (
            grad is None
            or grad.layout is not torch.strided
            or grad.requires_grad
            or not grad.is_contiguous()
            or state.watches_before
            or record.tensor is None
            or (record.policy is not None and record.policy.scale is not ReduceOp.MEAN)
        ):
            return None
        grads.append(grad)
    return grads
