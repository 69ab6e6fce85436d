"""``tf.IndexedSlices``: some rows of a tensor, by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals


class IndexedSlices:
    """Rows of a larger tensor: ``dense[indices[i]]`` belongs to ``values[i]``.

    A row may be named several times. A sparse COO tensor that is sparse in its first dimension may be given instead.

    Args:
        values: a tensor (or list) of shape ``(*indices.shape, *row shape)``.
        indices: int32 or int64 row numbers.
        dense_shape: of the larger tensor, if known.

    Raises:
        TypeError: the row numbers are no integers.

    Example:
        >>> v = Variable([10.0, 20.0, 30.0])
        >>> v.scatter_sub(IndexedSlices([1.0, 2.0], [0, 2])).value()
        tensor([ 9., 20., 28.])

    Source: ``tf.IndexedSlices``.
    """

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None) -> None:
        self.values = torch.as_tensor(values)
        self.indices = torch.as_tensor(indices)
        if self.indices.numel() == 0:
            self.indices = self.indices.to(torch.int64)
        if self.indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"indices of IndexedSlices must be int32 or int64 row numbers, got {self.indices.dtype}.")
        self.dense_shape = None if dense_shape is None else tuple(dense_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the values."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        """``dense_shape``."""
        return self.dense_shape

    def __repr__(self) -> str:
        return f"IndexedSlices(values={self.values!r}, indices={self.indices!r})"


def as_slices(value: Any) -> IndexedSlices:
    """``value`` if it is ``IndexedSlices``, or the rows of a sparse tensor.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, IndexedSlices):
        return value
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo and value.sparse_dim() == 1:
        rows = value.detach()
        return IndexedSlices(torch_internals.values_of(rows), torch_internals.indices_of(rows)[0], tuple(rows.shape))
    raise TypeError(
        "Argument `sparse_delta` must be an IndexedSlices(values, indices), or a torch.sparse_coo_tensor that is "
        f"sparse in its first dimension. Received: {value!r}."
    )
