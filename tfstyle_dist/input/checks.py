"""What is refused as a dataset or as a batch size, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.input.sharding import Layout


def refuse(dataset: Any) -> None:
    """Raises TypeError for what is not a dataset, with what to write instead."""
    what = type(dataset).__name__
    if isinstance(dataset, torch.Tensor | np.ndarray | tuple | Mapping | str | bytes):
        raise TypeError(
            f"A {what} is not a dataset of batches. Pass torch.utils.data.TensorDataset(...) with global_batch_size=, "
            "a DataLoader, or a list of batches."
        )
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"A {what} can be read only once, so a second epoch would be empty. Pass an object whose __iter__ starts "
            "anew (an IterableDataset, a DataLoader, a list), or strategy.distribute_datasets_from_function."
        )
    iterable = isinstance(dataset, Iterable | Dataset) or (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    )
    if not iterable:
        raise TypeError(f"{dataset!r} is not a dataset: pass a DataLoader, a Dataset or an iterable of batches.")


def refuse_scalars(batches: Any) -> None:
    """Raises TypeError for a list of Python numbers where batches are meant."""
    if isinstance(batches, list) and batches and isinstance(batches[0], bool | int | float | complex | str | bytes):
        raise TypeError(
            f"A list of {type(batches[0]).__name__} is not a dataset of batches: its elements must be tensors or nests "
            "of tensors. Pass e.g. [torch.tensor([1.0, 2.0]), ...], or the samples with global_batch_size=."
        )


def check_batch_size(size: Any, drop_remainder: bool, layout: Layout) -> None:
    """Refuses a global batch size that is no positive whole number, or too small to reach every replica.

    Args:
        size: what the user gave.
        drop_remainder: whether smaller batches are dropped: then every batch should reach all replicas.
        layout: numbers of workers and replicas.

    Raises:
        TypeError: not a whole number.
        ValueError: less than 1.
        InvalidArgumentError: smaller than the number of replicas, with ``drop_remainder``.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"global_batch_size must be a whole number, got {type(size).__name__}: {size!r}.")
    if size < 1:
        raise ValueError(f"global_batch_size must be at least 1, got {size}.")
    if drop_remainder and size < layout.all_replicas:
        raise InvalidArgumentError(
            f"A global batch of {size} is smaller than the {layout.all_replicas} replicas, so some replicas would "
            "never get an example although smaller batches are dropped. Use a larger global batch, or fewer replicas, "
            "or do not drop the remainder."
        )
