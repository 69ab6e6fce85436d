"""Values that are summed as one flat vector, wherever they live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Add = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
"""Writes the sum of one or more tensors, in a fixed order, into another one."""


class Flat(Protocol):
    """A vector that is read and written in parts."""

    @property
    def numel(self) -> int:
        """Number of elements."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type in which the values travel."""

    def read(self, start: int, stop: int, out: torch.Tensor, lasting: bool = False) -> None:
        """Copies elements ``start`` to ``stop`` to the beginning of ``out``.

        ``lasting`` says that ``out`` is memory of the group, which comes back and may be remembered.
        """

    def write(self, start: int, stop: int, parts: Sequence[torch.Tensor], add: Add, own: int | None = None) -> None:
        """Replaces elements ``start`` to ``stop`` by the sum of what is at the beginning of ``parts``.

        ``own`` says which of them holds what ``read`` gave, so that it need not be read from there again.
        """

    def in_place(self) -> tuple[Sequence[torch.Tensor], int | None] | None:
        """Contiguous tensors that one after the other are the vector, and by what sums are divided; None if not so."""


class BufferView:
    """A flat, contiguous tensor as a ``Flat``.

    Args:
        buffer: the tensor.
    """

    __slots__ = ("buffer", "dtype", "numel")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.dtype, self.numel = buffer, buffer.dtype, buffer.numel()

    def read(self, start: int, stop: int, out: torch.Tensor, lasting: bool = False) -> None:
        """See ``Flat``."""
        out[: stop - start].copy_(self.buffer[start:stop])

    def write(self, start: int, stop: int, parts: Sequence[torch.Tensor], add: Add, own: int | None = None) -> None:
        """See ``Flat``."""
        target = self.buffer[start:stop]
        if len(parts) == 1:
            target.copy_(parts[0][: stop - start])
        else:
            add(with_own([p[: stop - start] for p in parts], own, target), target)

    def in_place(self) -> tuple[Sequence[torch.Tensor], int | None]:
        """See ``Flat``."""
        return (self.buffer,), None


def with_own(parts: list[torch.Tensor], own: int | None, target: torch.Tensor) -> list[torch.Tensor]:
    """Takes the own one of two parts from the target, where it is still in the cache.

    Of more parts a sum in place would have to keep a copy.
    """
    if own is not None and len(parts) == 2:
        parts[own] = target
    return parts
