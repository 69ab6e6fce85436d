"""What a value was when a step began, and whether the step has changed it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.elastic.connections.packets import JSON_TYPES
from tfstyle_dist.elastic.state.serialized_values import ValueWriter, is_sent_as_tensor
from tfstyle_dist.variables.content.copies import CONTAINERS
from tfstyle_dist.variables.content.marks import Mark, tensor_state

_TENSOR = repr(["t", 0])  # how a tensor by itself is described


class BeforeImage:
    """What a value was; a module's own kernels may write to buffers without a version.

    Attributes:
        left_out: marks of what is in it and not sent.
    """

    __slots__ = ("_arrays", "_described", "_mark", "_tensors", "_value", "left_out")

    def __init__(self, writer: ValueWriter, value: Any) -> None:
        self.left_out: list[Any] = []
        self._arrays: list[tuple[np.ndarray, bytes]] = []
        self._described, self._mark = "", None
        if type(value) in JSON_TYPES:
            self._value = value
            return
        if is_sent_as_tensor(value):
            self._described, self._tensors = _TENSOR, [value.detach().clone()]
            return
        described, tensors, left_out = writer.describe(value)
        self._described, self._tensors = repr(described), [tensor.clone() for tensor in tensors]
        self.left_out = marks(left_out)
        self._arrays = [(array, _elements(array)) for array in writer.arrays]
        can_be_marked = type(value) in CONTAINERS and (type(value) is not set or not value)
        if can_be_marked and {type(v) for v in _parts(value)} <= JSON_TYPES:
            self._mark = Mark(value)

    def holds(self, value: Any) -> bool:
        """Whether it is seen at once that the value is the same."""
        if type(value) in JSON_TYPES:
            return not self._described and type(value) is type(self._value) and bool(value == self._value)
        return self._mark is not None and value is self._mark.value and self._mark.same()

    def renewed(self, writer: ValueWriter, value: Any) -> BeforeImage:
        """What a value is now; in the same memory where it fits."""
        if self.holds(value):
            return self
        if self._described == _TENSOR and is_sent_as_tensor(value):
            memory = self._tensors[0]
            fits = memory.shape == value.shape and memory.dtype == value.dtype and memory.stride() == value.stride()
            if fits and not memory.is_inference():
                memory.copy_(value.detach())
                return self
        return BeforeImage(writer, value)

    def written_arrays(self) -> bool:
        """Whether elements of an array in it were written to."""
        return any(_elements(array) != was for array, was in self._arrays)

    def differs(self, writer: ValueWriter, value: Any) -> bool:
        """Whether a value is another one; what the writer leaves out of it tells of the rest."""
        writer.left_out = []
        if self.holds(value):
            return False
        if type(value) in JSON_TYPES or not self._described:
            return True
        if self._described == _TENSOR and is_sent_as_tensor(value):
            return not _is_same(self._tensors[0], value)
        described, tensors, _ = writer.describe(value)
        return repr(described) != self._described or not all(map(_is_same, self._tensors, tensors))


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _elements(array: np.ndarray) -> bytes:
    """Those that are objects count as the same ones."""
    return b"" if array.dtype.hasobject else array.tobytes()


def _is_same(before: torch.Tensor, now: torch.Tensor) -> bool:
    if before.shape != now.shape or before.dtype != now.dtype:
        return False
    return torch.equal(bytes_of(before), bytes_of(now))


def marks(values: Iterable[Any]) -> list[Any]:
    """What tells whether something that is not sent was written to, as far as that shows from outside."""
    return [
        (
            id(value),
            tensor_state(value) if isinstance(value, torch.Tensor) else len(value) if type(value) in CONTAINERS else 0,
        )
        for value in values
    ]
