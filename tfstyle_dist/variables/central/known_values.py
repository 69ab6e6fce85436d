"""Values of settings and entries of state as they were: whether another one is the same, and may be put back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.central.shared_writes import same_values

GONE: Any = object()
"""The value of what is not there."""
PLAIN = (int, float, complex, str, type(None), np.generic)
"""Types of values that nobody writes to in place."""


@dataclass(slots=True)
class Value:
    """A setting, and what was in it if it is a tensor, which is written to in place."""

    value: Any
    inside: torch.Tensor | None = None

    @classmethod
    def of(cls, value: Any) -> Value:
        """That of now."""
        return cls(value, value.detach().clone() if isinstance(value, torch.Tensor) else None)

    @property
    def may_be_put_back(self) -> bool:
        """Whether nothing but its owner refers to what is in it."""
        return self.inside is not None or self.value is GONE or _is_plain(self.value)

    def is_as(self, other: Value) -> bool:
        """Whether both have one value."""
        if self.inside is not None:
            return same_values(self.inside, other.inside)
        return bool(mark_of(self.value) == mark_of(other.value))

    def __str__(self) -> str:
        return "none" if self.value is GONE else repr(self.value if self.inside is None else self.inside)


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def mark_of(value: Any) -> Any:
    """Something that changes when the value does; equal to itself, as NaN is not."""
    if isinstance(value, torch.Tensor):
        return id(value), torch_internals.version_of(value)
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return tuple(map(mark_of, value))
    return id(value)
