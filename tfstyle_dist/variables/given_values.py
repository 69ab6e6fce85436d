"""Numbers, lists and arrays that a program gives to a variable, as tensors of its dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tfstyle_dist.core.errors import InvalidArgumentError

_WHAT_TORCH_RAISES = (TypeError, ValueError, RuntimeError, OverflowError)


def dtype_of(dtype: torch.dtype | str | type[Any] | None) -> torch.dtype | None:
    """The dtype of torch that is meant; programs for TensorFlow also write ``"int64"``, ``np.float32`` or ``bool``.

    Args:
        dtype: one of torch, its name, or a type of numpy or Python; ``float`` is the default one of torch.

    Raises:
        ValueError: torch has no such dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype is float:
        return torch.get_default_dtype()
    try:
        name = dtype.removeprefix("torch.") if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = ""
    meant = getattr(torch, name, None)
    if not isinstance(meant, torch.dtype):
        raise ValueError(f"dtype must be one of torch, e.g. torch.float32, or its name, got {dtype!r}.")
    return meant


def refuse_other_kind(told: Callable[[], str], given: torch.dtype, dtype: torch.dtype) -> None:
    """Refuses what a conversion would cut off without a word: fractions and imaginary parts, as TensorFlow does.

    Args:
        told: tells what was given to which variable, for the message.
        given: dtype of the numbers given.
        dtype: of the variable.

    Raises:
        InvalidArgumentError: floating numbers for integers or bools, or complex ones for real ones.
    """
    if given.is_complex and not dtype.is_complex:
        lost = "imaginary parts"
    elif given.is_floating_point and not (dtype.is_floating_point or dtype.is_complex):
        lost = "fractions"
    else:
        return
    raise InvalidArgumentError(
        f"{told()}, of {given}, but its dtype is {dtype}, which has no {lost}. Create it with a dtype that has "
        f"them, e.g. dtype={given}, or write torch.as_tensor(value).to({dtype}) if they may be cut off."
    )


def tensor_of(value: Any, dtype: torch.dtype, told: Callable[[], str]) -> torch.Tensor:
    """What is no tensor yet as one, on the CPU; it may share the memory of an array.

    Args:
        value: number, nested list or array.
        dtype: of the variable.
        told: tells what was given to which variable, for messages.

    Raises:
        InvalidArgumentError: no numbers, numbers of another kind, or outside of what the dtype can hold.
    """
    try:
        given = torch.as_tensor(value, device="cpu")
    except _WHAT_TORCH_RAISES:  # whole numbers that no int64 holds: a dtype that holds them takes them as they are
        given = None
    numbers = given is not None and given.numel() > 0
    if given is not None and numbers:
        refuse_other_kind(told, given.dtype, dtype)
        if not _has_range_for(dtype, given):
            raise _outside(told, dtype)
    try:
        made = (
            given if given is not None and given.dtype == dtype else torch.as_tensor(value, dtype=dtype, device="cpu")
        )
    except _WHAT_TORCH_RAISES as error:
        raise InvalidArgumentError(
            f"{told()}, which is no tensor of {dtype}: {error}. Pass a number, an array or a tensor."
        ) from error
    if numbers and dtype.is_floating_point and _became_infinite(made, value):
        raise _outside(told, dtype)
    return made


def _outside(told: Callable[[], str], dtype: torch.dtype) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{told()}, which is outside of what {dtype} can hold. Create the variable with a wider dtype, or "
        f"write torch.as_tensor(value).to({dtype}) if another number is meant."
    )


def _has_range_for(dtype: torch.dtype, given: torch.Tensor) -> bool:
    """Whether an integer dtype, or bool, has each of these whole numbers."""
    if dtype.is_complex or dtype.is_floating_point or given.dtype == dtype:
        return True
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    numbers = given.numpy()  # torch finds no least and greatest one of the wide unsigned dtypes
    return low <= int(numbers.min()) and int(numbers.max()) <= high


def _became_infinite(made: torch.Tensor, value: Any) -> bool:
    """Whether numbers are too large for a floating dtype; an infinite one is not."""
    if made.dtype == torch.float64:
        return False
    if isinstance(value, int | float):
        return math.isfinite(value) and not math.isfinite(made)
    if isinstance(value, np.ndarray) and value.itemsize <= made.itemsize:
        return False
    lowest, highest = torch.aminmax(made.float())
    if math.isfinite(lowest) and math.isfinite(highest):
        return False
    return not bool((made.float().isfinite() | ~torch.as_tensor(value, dtype=torch.float64).isfinite()).all())
