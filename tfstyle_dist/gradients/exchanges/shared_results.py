"""What ranks of one host over central storage know of a bucket: its one result, and what the program sees of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.tensor_references import refer_to
from tfstyle_dist.gradients.buckets import Bucket
from tfstyle_dist.gradients.reducer import GradientState, has_further_hooks
from tfstyle_dist.shm.segment import Segment
from tfstyle_dist.variables.central.shared_home import dense_strides


@dataclass(frozen=True)
class Span:
    """The part of a parameter's gradient that lies in a range of its bucket.

    Attributes:
        position: the parameter's number in the bucket.
        start: where the part begins in the bucket.
        stop: where it ends.
    """

    position: int
    start: int
    stop: int


class SharedBucket:
    """A bucket, its result, and what has happened to it in this pass.

    Attributes:
        copies: whether this worker's gradients are copies of the result.
    """

    def __init__(self, bucket: Bucket, states: list[GradientState], segment: Segment, offset: int) -> None:
        self.bucket, self.states, self._segment = bucket, states, segment
        self._bytes = slice(offset, offset + bucket.numel * bucket.dtype.itemsize)
        self.result = segment.shared[self._bytes].view(bucket.dtype)
        self.strides = [dense_strides(r.components[0].detach()) for r in bucket.records]
        self.ends = [o + r.components[0].numel() for o, r in zip(bucket.offsets, bucket.records, strict=True)]
        self.missing = len(states)
        self.used = [True] * len(states)
        self.copies = False
        self._unused: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._given: dict[int, weakref.ref[memoryview]] = {}

    def gradient(self, position: int) -> torch.Tensor:
        """One result: this worker's view, or a copy."""
        if (current := self.seen(position)) is not None:
            return current
        start, stop = self.bucket.offsets[position], self.ends[position]
        flat = self.result[start:stop]
        if self.copies:
            flat = flat.clone()
        elif stop > start:
            given = self._given.get(position)
            view = (given and given()) or self._segment.private_bytes(*self._place(position))
            flat, self._given[position] = torch.frombuffer(view, dtype=self.bucket.dtype), weakref.ref(view)
        shaped = flat.as_strided(self.bucket.records[position].components[0].shape, self.strides[position])
        return shaped.detach()  # a view that was made here could not be written with something that needs a gradient

    def seen(self, position: int) -> torch.Tensor | None:
        """The gradient that a parameter has, if it is this worker's view of the result."""
        record = self.states[position].record
        grad = None if record.tensor is None else record.components[0].grad
        if self.copies or grad is None or grad.layout is not torch.strided or grad.dtype != self.bucket.dtype:
            return None
        return grad if grad.data_ptr() == self._segment.private.data_ptr() + self._place(position)[0] else None

    def _place(self, position: int) -> tuple[int, int]:
        """The bytes of one result in the segment."""
        size, first = self.bucket.dtype.itemsize, self._bytes.start
        return first + self.bucket.offsets[position] * size, first + self.ends[position] * size

    def keep_views(self) -> None:
        """The results are about to change: a view that only the program keeps goes on showing the last ones."""
        for position, given in list(self._given.items()):
            view = given()
            if view is not None and self.seen(position) is None:
                values = torch.frombuffer(view, dtype=torch.uint8)
                values.copy_(values.clone())  # written, the pages are this worker's
                self.copies = True
                del self._given[position]

    def keep_unused(self, position: int) -> None:
        """Nobody used a parameter: its gradient stays what it was."""
        if (gradient := self.seen(position)) is not None:
            self._unused.append((gradient, gradient.clone()))

    def drop(self, position: int) -> None:
        """Frees a gradient that was sent; if the program holds it, or a part of its memory, it gets the result."""
        parameter = self.states[position].record.components[0]
        gradient = parameter.grad
        if gradient is None or self.seen(position) is not None:
            return
        if gradient.is_sparse or torch_internals.lie_alone(gradient):
            held = refer_to(gradient)
            gradient = parameter.grad = None
            parameter.grad = held()

    def refresh(self) -> None:
        """Drops what this worker wrote to its view of the last results, but for those that nobody had new ones of."""
        if not self.copies:
            self._segment.forget(self._bytes.start, self._bytes.stop)
        while self._unused:
            gradient, values = self._unused.pop()
            gradient.copy_(values)

    def has_hooks(self) -> bool:
        """Whether a parameter has hooks for its gradient beside the strategy's own."""
        parameters = [s.record.components[0] for s in self.states if s.record.tensor is not None]
        return any(map(has_further_hooks, parameters))

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """The parts of gradients in a range of the bucket."""
        for position, (offset, end) in enumerate(zip(self.bucket.offsets, self.ends, strict=True)):
            if offset < stop and end > start:
                yield Span(position, max(offset, start), min(end, stop))
