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
from torch.nn.parameter import is_lazy

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.process_hooks import CountedUsers, DataPatch
from tfstyle_dist.core.tensor_references import refer_to
from tfstyle_dist.variables.content.held_data import HeldData
from tfstyle_dist.variables.content.marks import Mark
from tfstyle_dist.variables.content.object_content import ObjectContent
from tfstyle_dist.variables.content.parameter_marks import memory_of
from tfstyle_dist.variables.content.parameter_rows import ParameterRows
from tfstyle_dist.variables.content.shared_tensors import SharedTensors

_Given = tuple[weakref.ref[torch.Tensor], int]


class DataWrites:
    """The tensors that ``.data`` gave out, and how often each had been written to when cross-replica context began.

    Args:
        active: gives the replica whose turn it is; ``None`` in cross-replica context.
        places: by id: the place of a parameter in ``rows``.
        rows: the parameters; new ones come at the end.
        objects: gives the contents of all objects; likewise.
        shared: the tensors that a step names and no object holds.
    """

    def __init__(
        self,
        active: Callable[[], int | None],
        places: Mapping[int, Any],
        rows: ParameterRows,
        objects: Callable[[], Sequence[ObjectContent]],
        shared: SharedTensors,
    ) -> None:
        self._shared = shared
        self._active, self._places, self._rows, self._objects = active, places, rows, objects
        self._given: dict[int, _Given] = {}  # by id
        self._held = HeldData()  # by memory
        self._forget()

    def _forget(self) -> None:
        """The content may lie in other memory now."""
        self._memory: dict[int, weakref.ref[torch.Tensor]] = {}
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
                self._memory[memory_of(tensor)] = refer_to(tensor)
                self._numbers.add(id(tensor))
            self._memory.pop(0, None)

    def _is_content(self, where: int) -> bool:
        """Whether a tensor of content lies in this memory now: one that was let go may be given out again."""
        if where not in self._memory:
            return False
        if (tensor := self._memory[where]()) is None or memory_of(tensor) != where:
            self._forget()
            self._look()
        return where in self._memory

    def data_is_read(self, tensor: torch.Tensor, data: torch.Tensor | None) -> None:
        """Somebody has a tensor's ``data`` now, and may write there; ``None``: has set it."""
        if self._active() is not None:
            self._rows.data_is_read_in_turn(self._places.get(id(tensor), -1), data)
            self._shared.data_is_read(tensor, data)
        elif id(tensor) in self._places:
            self._rows.data_is_read(tensor, is_set=data is None)
            if data is not None and not tensor.requires_grad:  # its values alone do not tell a write of the same ones
                self._held.add(memory_of(data), data)
        else:
            self._look()
            if data is None and id(tensor) in self._numbers:  # its memory may be some that it had before
                _count_write(tensor)
            if data is None or not self._is_content(where := memory_of(data)):
                return
            self._held.add(where, data)
        if data is not None and (is_lazy(data) or not data.is_inference()):
            self._given[id(data)] = refer_to(data), torch_internals.version_of(data)

    def _was_written(self, data: torch.Tensor) -> bool:
        return self._given[id(data)][1] != torch_internals.version_of(data)

    def _living(self) -> list[torch.Tensor]:
        return [data for reference, _ in self._given.values() if (data := reference()) is not None]

    def count(self) -> None:
        """Counts what was written as writes to the tensors themselves; cross-replica context ends."""
        if self._given:
            written = self._held.written() | {memory_of(data) for data in self._living() if self._was_written(data)}
            for tensor in self._tensors() if written else ():
                if memory_of(tensor) in written:
                    _count_write(tensor)
            self._held.clear()

    def begin(self) -> None:
        """Cross-replica context begins, and all objects were marked: only what is written from now on counts."""
        if self._given:
            self._given = {id(data): (refer_to(data), torch_internals.version_of(data)) for data in self._living()}
        self._forget()


def _within(mark: Mark) -> Iterator[torch.Tensor]:
    if isinstance(mark.value, torch.Tensor):
        yield mark.value
    for part in mark.parts():
        yield from _within(part)


def _count_write(tensor: torch.Tensor) -> None:
    # A lazy one is not content yet: it has the number of one that is gone.
    if not is_lazy(tensor) and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


_readers: list[weakref.ref[DataWrites]] = []


def _notice(tensor: torch.Tensor, data: torch.Tensor | None) -> None:
    for reference in _readers[:]:  # one may go meanwhile
        if (reader := reference()) is not None:
            reader.data_is_read(tensor, data)


_patch = DataPatch(_notice)


class DataReads(CountedUsers):
    """Tells one of these, while it is installed and that one lives, which tensors may have been written to."""

    def __init__(self, reader: DataWrites) -> None:
        super().__init__()
        self._reader = weakref.ref(reader)

    def _needed(self, first: bool) -> None:
        _patch.install()
        _readers.append(self._reader)

    def _not_needed(self, last: bool) -> None:
        _readers.remove(self._reader)
        _patch.uninstall()
