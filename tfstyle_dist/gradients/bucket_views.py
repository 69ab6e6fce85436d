"""The gradients of a bucket as one flat vector, without a buffer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tfstyle_dist.comm.collectives.flat import Add, with_own
from tfstyle_dist.core import torch_internals


@dataclass
class _Chunk:
    """A range of the vector.

    Attributes:
        spans: for each tensor in it its number, the first and last element (``None``: all of it), and where it begins.
        numel: length of the range.
        views: the spans as views of a memory that lasts, by its address.
    """

    spans: list[tuple[int, int | None, int, int]]
    numel: int
    views: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class BucketViews:
    """A ``Flat`` of gradients that are summed, divided and written back where they are.

    Args:
        shapes: of the gradients, in order.
        dtype: in which they are summed.
        divisor: by what the sum is divided.
    """

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, divisor: int) -> None:
        self.dtype, self._shapes, self._divisor = dtype, list(shapes), divisor
        self._starts, self.numel = [], 0
        for shape in shapes:
            self._starts.append(self.numel)
            self.numel += shape.numel()
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._scratch = torch.empty(0, dtype=dtype)
        self.grads: Sequence[torch.Tensor] = ()

    def read(self, start: int, stop: int, out: torch.Tensor, lasting: bool = False) -> None:
        """See ``Flat``."""
        chunk = self._chunk(start, stop)
        if chunk.spans:
            views = self._lasting_views(chunk, out) if lasting else self._views(chunk, out)
            torch_internals.foreach_copy_(views, self._sources(chunk))

    def write(self, start: int, stop: int, parts: Sequence[torch.Tensor], add: Add, own: int | None = None) -> None:
        """See ``Flat``."""
        chunk = self._chunk(start, stop)
        targets = self._sources(chunk)
        if not targets:
            return
        if len(targets) == 1 and targets[0].dtype == self.dtype and targets[0].is_contiguous():
            total = targets[0].view(-1)
            self._total(with_own([p[: chunk.numel] for p in parts], own, total), add, total)
            return
        if self._scratch.numel() < chunk.numel:
            self._scratch = torch.empty(chunk.numel, dtype=self.dtype)
            for known in self._chunks.values():
                known.views.clear()
        self._total([p[: chunk.numel] for p in parts], add, self._scratch[: chunk.numel])
        torch_internals.foreach_copy_(targets, self._lasting_views(chunk, self._scratch))

    def in_place(self) -> tuple[Sequence[torch.Tensor], int | None] | None:
        """See ``Flat``."""
        simple = all(g.dtype == self.dtype and g.is_contiguous() for g in self.grads)
        return (self.grads, self._divisor) if simple else None

    def _total(self, parts: Sequence[torch.Tensor], add: Add, out: torch.Tensor) -> None:
        if len(parts) == 1:
            torch.div(parts[0], self._divisor, out=out)
        else:
            add(parts, out)
            out.div_(self._divisor)

    def _chunk(self, start: int, stop: int) -> _Chunk:
        chunk = self._chunks.get((start, stop))
        if chunk is None:
            spans: list[tuple[int, int | None, int, int]] = []
            for number, (first, shape) in enumerate(zip(self._starts, self._shapes, strict=True)):
                low, high = max(start, first), min(stop, first + shape.numel())
                if low < high:
                    whole = high - low == shape.numel()
                    spans.append((number, None if whole else low - first, high - first, low - start))
            chunk = self._chunks[start, stop] = _Chunk(spans, stop - start)
        return chunk

    def _sources(self, chunk: _Chunk) -> list[torch.Tensor]:
        """The spans as they lie in the gradients; one that is cut must be contiguous."""
        grads = self.grads
        return [
            grads[number] if low is None else grads[number].view(-1)[low:high] for number, low, high, _ in chunk.spans
        ]

    def _lasting_views(self, chunk: _Chunk, memory: torch.Tensor) -> list[torch.Tensor]:
        """As ``_views``; they are kept, and keep the memory."""
        views = chunk.views.get(memory.data_ptr())
        if views is None:
            views = chunk.views[memory.data_ptr()] = self._views(chunk, memory)
        return views

    def _views(self, chunk: _Chunk, memory: torch.Tensor) -> list[torch.Tensor]:
        """The spans as they lie in a memory that holds the range from its beginning."""
        views = []
        for number, low, high, offset in chunk.spans:
            shape = self._shapes[number]
            size = shape.numel() if low is None else high - low
            view = memory[offset : offset + size]
            views.append(view.view(shape) if low is None else view)
        return views
