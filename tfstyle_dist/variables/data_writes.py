"""What a program writes through the ``.data`` of a gradient, a buffer or a tensor of an optimizer's state.

It leaves no mark on the tensor itself. What ``.data`` gives is a tensor that counts its own writes; those of cross-
replica context are counted for all that lies in the same memory, as if they had been made there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables import data_reads
from tfstyle_dist.variables.copies import Mark
from tfstyle_dist.variables.object_content import ObjectContent
from tfstyle_dist.variables.parameter_marks import memory_of
from tfstyle_dist.variables.parameter_rows import ParameterRows

_Given = tuple[weakref.ref[torch.Tensor], int]


class DataWrites:
    """The tensors that ``.data`` gave out, and how often each had been written to when cross-replica context began.

    Args:
        active: gives the replica whose turn it is; ``None`` in cross-replica context.
        places: by id: the place of a parameter in ``rows``.
        rows: the parameters; new ones come at the end.
        objects: gives the contents of all objects; likewise.
    """

    def __init__(
        self,
        active: Callable[[], int | None],
        places: Mapping[int, Any],
        rows: ParameterRows,
        objects: Callable[[], Sequence[ObjectContent]],
    ) -> None:
        self._active, self._places, self._rows, self._objects = active, places, rows, objects
        self._given: list[_Given] = []
        self._held: list[torch.Tensor] = []  # until the next run: mostly the program lets them go at once
        self._forget()
        data_reads.readers.add(self)

    def _forget(self) -> None:
        """The content may lie in other memory now."""
        self._memory: set[int] = set()
        self._numbers: set[int] = set()
        self._seen = 0, 0

    def _tensors(self, objects: int = 0, parameters: int = 0) -> Iterator[torch.Tensor]:
        """All tensors of content, without those of the first objects and parameters."""
        for reference in islice(self._rows.references, parameters, None):
            if (parameter := reference()) is not None:
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
        for content in islice(self._objects(), objects, None):
            for mark in content.deep:
                yield from _within(mark)

    def _look(self) -> None:
        seen, self._seen = self._seen, (len(self._objects()), len(self._rows.references))
        if seen != self._seen:
            for tensor in self._tensors(*seen):
                self._memory.add(memory_of(tensor))
                self._numbers.add(id(tensor))
            self._memory.discard(0)

    def data_is_read(self, tensor: torch.Tensor, data: torch.Tensor | None) -> None:
        """See ``data_reads.Reader``."""
        place = self._places.get(id(tensor))
        if self._active() is not None:
            self._rows.data_is_read(tensor, -1 if place is None else place)
            return
        if place is not None:
            self._rows.data_is_read(tensor, None)
        else:
            self._look()
            if data is None and id(tensor) in self._numbers:  # its memory may be some that it had before
                _count_write(tensor)
            elif data is not None and memory_of(data) in self._memory:
                self._held.append(data)
            else:
                return
        if data is not None:
            self._given.append((weakref.ref(data), torch_internals.version_of(data)))

    def count(self) -> None:
        """Counts what was written as writes to the tensors themselves; cross-replica context ends."""
        if self._given:
            given = [(data, version) for ref, version in self._given if (data := ref()) is not None]
            written = {memory_of(data) for data, version in given if torch_internals.version_of(data) != version}
            for tensor in self._tensors() if written else ():
                if memory_of(tensor) in written:
                    _count_write(tensor)
            self._held.clear()

    def begin(self) -> None:
        """Cross-replica context begins, and all objects were marked: only what is written from now on counts."""
        if self._given:
            living = [data for ref, _ in self._given if (data := ref()) is not None]
            self._given = [(weakref.ref(data), torch_internals.version_of(data)) for data in living]
        self._forget()


def _within(mark: Mark) -> Iterator[torch.Tensor]:
    if isinstance(mark.value, torch.Tensor):
        yield mark.value
    for part in mark.parts():
        yield from _within(part)


def _count_write(tensor: torch.Tensor) -> None:
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
