"""``tf.distribute.experimental.partitioners``: into how many shards a variable is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import torch


def _element_size(dtype: Any, bytes_per_string: int) -> int:
    """Bytes of one element; texts count ``bytes_per_string``."""
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    if dtype in (str, bytes, "string", "str"):
        return bytes_per_string
    raise TypeError(f"dtype must be a torch.dtype or str, got {dtype!r}.")


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be positive, got {value}.")
    return value


class Partitioner:
    """Base of the partitioners: a function of shape and dtype (``tf.distribute.experimental.partitioners``)."""

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """The number of shards along each dimension.

        Args:
            shape: shape of the variable.
            dtype: its element type, a ``torch.dtype`` (or ``str``).
            axis: the dimension along which it is cut.

        Returns:
            One number for each dimension: 1 everywhere but at ``axis``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it divides a variable: define __call__")


class FixedShardsPartitioner(Partitioner):
    """A fixed number of shards, but no more than there are rows.

    Args:
        num_shards: how many.

    Example:
        >>> FixedShardsPartitioner(2)([10, 3], torch.float32)
        [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        result = [1] * len(shape)
        result[axis] = min(self._num_shards, shape[axis])
        return result


class MinSizePartitioner(Partitioner):
    """As many shards as give each about ``min_shard_bytes``, at most ``max_shards``.

    Args:
        min_shard_bytes: the number of shards is the size divided by this, rounded up.
        max_shards: upper limit.
        bytes_per_string: what an element of a text variable counts.

    Raises:
        ValueError: an argument below 1.

    Example:
        >>> MinSizePartitioner(16, max_shards=2)([10, 3], torch.float32)
        [2, 1]
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        result, rows = [1] * len(shape), shape[axis]
        total = math.prod(shape) * _element_size(dtype, self._bytes_per_string)
        result[axis] = max(1, min(math.ceil(total / self._min_shard_bytes), self._max_shards, rows))
        return result


class MaxSizePartitioner(Partitioner):
    """So many shards that none is larger than ``max_shard_bytes``.

    Args:
        max_shard_bytes: upper limit of one shard's size; one row is the smallest shard.
        max_shards: upper limit of their number; ``None`` or 0: none.
        bytes_per_string: what an element of a text variable counts.

    Raises:
        ValueError: an argument below 1 (``max_shards``: below 0).

    Example:
        >>> MaxSizePartitioner(16)([10], torch.float32)
        [3]
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards) if max_shards else None
        self._bytes_per_string = _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        result, rows = [1] * len(shape), shape[axis]
        row_bytes = math.prod(n for d, n in enumerate(shape) if d != axis % len(shape))
        row_bytes *= _element_size(dtype, self._bytes_per_string)
        rows_per_shard = max(1, self._max_shard_bytes // max(row_bytes, 1))
        shards = max(1, math.ceil(rows / rows_per_shard))
        result[axis] = min(shards, self._max_shards) if self._max_shards is not None else shards
        return result


def fixed_size_partitioner(num_shards: int, axis: int = 0) -> Callable[..., list[int]]:
    """A fixed number of shards along ``axis``; see ``FixedShardsPartitioner``.

    Args:
        num_shards: how many.
        axis: the dimension along which a variable is cut.

    Returns:
        A function of shape and dtype, to be given to a strategy as ``variable_partitioner``.

    Example:
        >>> fixed_size_partitioner(2, axis=1)([10, 3], torch.float32)
        [1, 2]

    Source: ``tf.compat.v1.fixed_size_partitioner``.
    """
    return partial(FixedShardsPartitioner(num_shards), axis=axis)


def min_max_variable_partitioner(
    max_partitions: int = 1, axis: int = 0, min_slice_size: int = 256 << 10, bytes_per_string_element: int = 16
) -> Callable[..., list[int]]:
    """Shards of at least about ``min_slice_size`` bytes along ``axis``; see ``MinSizePartitioner``.

    Args:
        max_partitions: upper limit of their number.
        axis: the dimension along which a variable is cut.
        min_slice_size: bytes of a shard.
        bytes_per_string_element: what an element of a text variable counts.

    Returns:
        A function of shape and dtype, to be given to a strategy as ``variable_partitioner``.

    Raises:
        ValueError: a number below 1.

    Example:
        >>> min_max_variable_partitioner(2, min_slice_size=16)([10, 3], torch.float32)
        [2, 1]

    Source: ``tf.compat.v1.min_max_variable_partitioner``.
    """
    return partial(MinSizePartitioner(min_slice_size, max_partitions, bytes_per_string_element), axis=axis)


def variable_axis_size_partitioner(
    max_shard_bytes: int, axis: int = 0, bytes_per_string_element: int = 16, max_shards: int | None = None
) -> Callable[..., list[int]]:
    """Shards of at most ``max_shard_bytes`` along ``axis``; see ``MaxSizePartitioner``.

    Args:
        max_shard_bytes: upper limit of one shard's size; one row is the smallest shard.
        axis: the dimension along which a variable is cut.
        bytes_per_string_element: what an element of a text variable counts.
        max_shards: upper limit of their number; ``None`` or 0: none.

    Returns:
        A function of shape and dtype, to be given to a strategy as ``variable_partitioner``.

    Raises:
        ValueError: a number below 1 (``max_shards``: below 0).

    Example:
        >>> variable_axis_size_partitioner(16)([10], torch.float32)
        [3]

    Source: ``tf.compat.v1.variable_axis_size_partitioner``.
    """
    return partial(MaxSizePartitioner(max_shard_bytes, max_shards, bytes_per_string_element), axis=axis)


def split_rows(rows: int, shards: int) -> list[int]:
    """The sizes of the shards: they differ by at most one, the larger ones first (7 over 3: 3, 2, 2)."""
    small, larger = divmod(rows, shards)
    return [small + 1] * larger + [small] * (shards - larger)


def checked_partitioner(partitioner: Any) -> Callable[..., Sequence[int]] | None:
    """What a strategy was given as ``variable_partitioner``.

    Raises:
        TypeError: it cannot be called.
    """
    if partitioner is not None and not callable(partitioner):
        raise TypeError(
            f"variable_partitioner must be a function of shape and dtype, got {partitioner!r}; write e.g. "
            "experimental.partitioners.FixedShardsPartitioner(2), or None for one shard each."
        )
    return partitioner  # type: ignore[no-any-return]


def shard_count(partitioner: Callable[..., Any], shape: Sequence[int], dtype: torch.dtype, name: str) -> int:
    """Into how many shards a tensor of one dimension or more is cut: at most one for each row.

    Raises:
        ValueError: the partitioner gives no number for each dimension, or cuts another one than the first.
    """
    given = partitioner(torch.Size(shape), dtype)
    numbers = isinstance(given, Sequence) and all(isinstance(n, Integral) for n in given)
    least = min(1, shape[0])  # FixedShardsPartitioner gives none for a tensor without rows
    if not numbers or len(given) != len(shape) or given[0] < least or any(n != 1 for n in given[1:]):
        raise ValueError(
            f"The variable_partitioner gave {given!r} for {name!r} of shape {tuple(shape)}: it must give a list or "
            "tuple with a whole number from 1 on for each dimension, and a variable is cut along its first dimension "
            f"only, so every other entry must be 1. Return e.g. {[2] + [1] * (len(shape) - 1)}."
        )
    return max(1, min(int(given[0]), shape[0]))
