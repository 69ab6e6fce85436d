"""Which tensors can be summed, and in which dtype: the same for all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

HALF: Final = frozenset({torch.float16, torch.bfloat16})
_DIVISIBLE: Final = HALF | {torch.float32, torch.float64, torch.complex64, torch.complex128}
_SUPPORTED: Final = _DIVISIBLE | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a running total: float32 for float16 and bfloat16, otherwise ``dtype`` itself."""
    return torch.float32 if dtype in HALF else dtype


def find_problem(
    contributions: Sequence[Tensor],
    out: Tensor | None = None,
    *,
    divisor: int | float | None = None,
    indices: Sequence[int] | None = None,
) -> str | None:
    """Says why these arguments cannot be summed, or ``None`` if they can.

    Args:
        contributions: what would be summed.
        out: where the sum would be written.
        divisor: what the sum would be divided by.
        indices: the numbers by which the message names the contributions; 0, 1, ... by default.
    """
    if not contributions:
        return "there is nothing to sum: give at least one contribution"
    names = range(len(contributions)) if indices is None else indices
    first = contributions[0]
    dtype, shape, device = first.dtype, first.shape, first.device
    named = f"contribution {names[0]}"
    if dtype not in _SUPPORTED:
        return f"{named} has dtype {dtype}, which has no sum: cast the contributions first"
    for name, other in zip(names, contributions, strict=True):
        if other.shape != shape:
            return f"contribution {name} has shape {tuple(other.shape)} but {named} has {tuple(shape)}"
        if other.dtype != dtype:
            return f"contribution {name} has dtype {other.dtype} but {named} has {dtype}"
        if other.device != device:
            return f"contribution {name} is on device {other.device} but {named} is on {device}"
    if divisor is not None:
        if dtype not in _DIVISIBLE:
            return f"contributions of {dtype} cannot be divided by {divisor}: cast them to floats"
        if divisor == 0:
            return "the divisor is 0: give the number of values the mean is taken over"
    return None if out is None else _find_problem_of_out(first, out)


def _find_problem_of_out(first: Tensor, out: Tensor) -> str | None:
    if out.shape != first.shape:
        return f"out has shape {tuple(out.shape)} but the contributions have {tuple(first.shape)}"
    if out.dtype not in (first.dtype, accumulation_dtype(first.dtype)):
        return f"out has dtype {out.dtype} but the contributions have {first.dtype}"
    if out.device != first.device:
        return f"out is on device {out.device} but the contributions are on {first.device}"
    return None
