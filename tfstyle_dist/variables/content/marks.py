"""What values were, to see in few calls whether somebody wrote to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter, is_
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.content.copies import MOST_ENTRIES, PLAIN_TENSORS, has_attributes_beside, is_container

SILENT_STATISTICS = ("running_mean", "running_var", "min_val", "max_val", "scale", "zero_point")
"""Buffers that kernels write to without counting it: those of batch norm, and of fused fake quantization."""
_COUNTER = "num_batches_tracked"  # batch norm counts its writes here


class Mark:
    """What a value was: ``same`` says whether it still is.

    Args:
        value: anything.
        outer: the containers in which it is, by ``id``: one may hold itself.
    """

    __slots__ = ("_attributes", "_beside", "_flat", "_keys", "_marks", "_state", "value")

    def __init__(self, value: Any, outer: tuple[int, ...] = ()) -> None:
        self.value = value
        self._beside: tuple[torch.Tensor, Any] | None = None  # of a tensor that is written to in silence
        self._keys: list[Any] | None = None
        self._flat = True
        self._marks: list[Mark | Any] = []
        self._attributes: Mark | None = None  # of a list of a class of its own
        if isinstance(value, torch.Tensor):
            self._state: Any = tensor_state(value)
            return
        self._state = len(value)
        if has_attributes_beside(value):
            self._attributes = Mark(value.__dict__, (*outer, id(value)))
        if self._state and self._state <= MOST_ENTRIES:
            outer = (*outer, id(value))
            if isinstance(value, dict):
                self._keys = list(value)
                self._marks = [marked(v, outer) for v in value.values()]
                self._watch_statistics(value)
            elif not isinstance(value, set):
                self._marks = [marked(v, outer) for v in value]
            self._flat = not any(type(mark) is Mark for mark in self._marks)

    def _watch_statistics(self, buffers: dict[Any, Any]) -> None:
        if any(name in buffers for name in SILENT_STATISTICS):
            counter = buffers.get(_COUNTER)
            for name, mark in zip(buffers, self._marks, strict=True):
                if name in SILENT_STATISTICS and type(mark) is Mark and isinstance(mark.value, torch.Tensor):
                    mark._look_beside(counter if isinstance(counter, torch.Tensor) else mark.value)

    def _look_beside(self, counter: torch.Tensor) -> None:
        """Remembers the state of a counter; where there is none the values themselves."""
        self._beside = counter, counter.detach().clone() if counter is self.value else tensor_state(counter)

    def _is_same_beside(self) -> bool:
        if self._beside is None:
            return True
        counter, before = self._beside
        return torch.equal(counter, before) if counter is self.value else tensor_state(counter) == before

    def renew(self, outer: tuple[int, ...] = (), tensors: bool = True) -> None:
        """Remembers the value as it is now; of a container that was added to, only what is new is marked.

        Args:
            outer: as above.
            tensors: whether to look at tensors in containers too; not where ``TensorMarks`` has done so.
        """
        if self.same():
            return
        value, had = self.value, self._state
        if isinstance(value, torch.Tensor):
            self._state = tensor_state(value)
            if self._beside is not None:
                self._look_beside(self._beside[0])
        elif not self._marks or not had <= len(value) <= MOST_ENTRIES or not self._begins_as_before():
            self.__init__(value, outer)  # type: ignore[misc]
        else:
            outer = (*outer, id(value))
            for mark in self.parts():
                if tensors or not isinstance(mark.value, torch.Tensor):
                    mark.renew(outer, tensors)
            self._add([marked(v, outer) for v in islice(value if self._keys is None else value.values(), had, None)])

    def _add(self, marks: list[Any]) -> None:
        self._marks += marks
        self._flat = self._flat and not any(type(mark) is Mark for mark in marks)
        if self._keys is not None and marks:
            self._keys += islice(self.value, self._state, None)
            self._watch_statistics(self.value)
        self._state = len(self.value)

    def _begins_as_before(self) -> bool:
        """Whether the first entries of a container are those that it had."""
        if self._keys is None:
            return all(map(_is_of, self.value, self._marks))
        return all(map(is_, self.value, self._keys)) and all(map(_is_of, self.value.values(), self._marks))

    @property
    def looks_inside(self) -> bool:
        """Whether the entries of a container are compared, not its size alone."""
        return bool(self._marks)

    def parts(self) -> list[Mark]:
        """The marks of what a container holds."""
        beside = [] if self._attributes is None else [self._attributes]
        return [mark for mark in self._marks if type(mark) is Mark] + beside

    def entries(self) -> Iterator[tuple[Any, Mark]]:
        """The keys of a dict, or the places of a sequence, with the marks of the containers and tensors there."""
        keys = range(len(self._marks)) if self._keys is None else self._keys
        for key, mark in () if self._flat else zip(keys, self._marks, strict=True):
            if type(mark) is Mark:
                yield key, mark

    def has_same_entries(self) -> bool:
        """Whether a container holds the same objects, and so do those within; tensors may have been written to."""
        value = self.value
        if isinstance(value, torch.Tensor):
            return True
        if self._attributes is not None and not self._attributes.has_same_entries():
            return False
        if len(value) != self._state or (self._keys is not None and not all(map(is_, value, self._keys))):
            return False
        entries = zip(value if self._keys is None else value.values(), self._marks, strict=False)
        return all(
            (entry is mark.value and mark.has_same_entries()) if type(mark) is Mark else entry is mark
            for entry, mark in entries
        )

    def is_in_place(self) -> bool:
        """Whether a tensor has the memory that it had: if it is not the same, it was written to there."""
        return bool(tensor_state(self.value)[1] == self._state[1])

    def same(self) -> bool:
        """Whether the value was not written to."""
        value = self.value
        if isinstance(value, torch.Tensor):
            return tensor_state(value) == self._state and self._is_same_beside()
        if len(value) != self._state or (self._attributes is not None and not self._attributes.same()):
            return False
        if not self._state:
            return True
        if self._keys is not None:
            if not all(map(is_, value, self._keys)):
                return False
            value = value.values()
        return all(map(is_ if self._flat else unchanged, value, self._marks))


class TensorMarks:
    """The marks of many tensors: mostly none was written to, and that is seen in few calls of C.

    Args:
        marks: just made or renewed.
    """

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._marks = marks
        self._tensors = list(map(attrgetter("value"), marks))
        self._silent = [mark for mark in marks if mark._beside is not None]
        self._states = self._now()

    def _now(self) -> tuple[list[int], list[int]] | None:
        """The versions and addresses, if all have them: sparse tensors and those of inference mode do not."""
        try:
            return list(map(torch_internals.version_of, self._tensors)), list(map(torch.Tensor.data_ptr, self._tensors))
        except RuntimeError:
            return None

    def same(self) -> bool:
        """Whether no tensor was written to."""
        now = self._now()
        if now is None:
            return all(map(Mark.same, self._marks))
        return now == self._states and all(map(Mark.same, self._silent))

    def renew(self) -> None:
        """Remembers the tensors as they are now."""
        now = self._now()
        if now is not None and now != self._states:
            for mark, *state in zip(self._marks, *now, strict=True):
                mark._state = tuple(state)
        for mark in self._marks if now is None else self._silent:
            mark.renew()
        self._states = now


def marked(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """A mark of a container or tensor; of anything else the value itself, which is only compared by identity."""
    kind = type(value)
    if kind in PLAIN_TENSORS or (is_container(value) and id(value) not in outer):
        return Mark(value, outer)
    return value


def _is_of(value: Any, mark: Any) -> bool:
    return value is (mark.value if type(mark) is Mark else mark)


def unchanged(value: Any, mark: Any) -> bool:
    """Whether a value is what ``marked`` saw, and was not written to."""
    if type(mark) is Mark:
        return value is mark.value and mark.same()
    return value is mark


def tensor_state(value: torch.Tensor) -> tuple[Any, ...]:
    """Changes whenever a tensor is written to, or gets another memory."""
    if value.is_inference():
        return (-1, value.data_ptr())
    return torch_internals.version_of(value), value.data_ptr() if value.layout is torch.strided else value.shape
