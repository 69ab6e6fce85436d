"""A dataset of the entries of arrays."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from tfstyle_dist.core import nest


class ArrayDataset(Dataset[Any]):
    """A nest of arrays of one length as a map-style dataset: sample i is the nest of their entries i.

    Args:
        arrays: numpy arrays or tensors, e.g. ``(images, labels)`` or a dict.

    Raises:
        ValueError: no arrays, a scalar, or arrays of different lengths.
    """

    def __init__(self, arrays: Any) -> None:
        leaves, self._spec = nest.flatten(arrays)
        self._leaves = [torch.as_tensor(leaf) for leaf in leaves]
        shapes = [tuple(leaf.shape) for leaf in self._leaves]
        if not shapes or () in shapes or len({shape[0] for shape in shapes}) > 1:
            raise ValueError(
                f"The arrays of a dataset must have one length, the number of samples, got shapes {shapes}."
            )

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._leaves[0])

    def __getitem__(self, index: int) -> Any:
        """One sample."""
        return nest.unflatten([leaf[index] for leaf in self._leaves], self._spec)
