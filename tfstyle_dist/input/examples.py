"""Batches that ``collate_fn`` made in a way of its own: lists with an entry for each sample, and other numbers."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.input.grouping import Lists, Path
from tfstyle_dist.input.layouts import BATCHES_OF_ITS_OWN
from tfstyle_dist.input.split import fresh, is_leaf, is_text_list, leading_size, slice_batch


def empty_of(read: Callable[[int], Any], plain: bool) -> Any:
    """A batch of no examples.

    Args:
        read: gives the batch of so many samples.
        plain: whether lists are known to hold fields, as those of torch's own collate function do.

    Raises:
        IndexError, TypeError, InvalidArgumentError: see ``split.leading_size``.
    """
    one = read(1)
    with no_empty_one():
        if plain or 1 not in lengths(one):
            leading_size(one)
            return slice_batch(one, range(0))
        return emptied(one, frozenset(lists_of(one, read(2))))


@contextlib.contextmanager
def no_empty_one() -> Iterator[None]:
    """Adds to an error inside why an empty batch is made, and how none is needed."""
    try:
        yield
    except (IndexError, TypeError, InvalidArgumentError) as error:
        error.add_note(
            "A batch of this epoch leaves a replica without examples, and no empty one can be made of what collate_fn "
            "returned. With drop_last=True (drop_remainder=True) there is no smaller last batch."
        )
        raise


def emptied(batch: Any, lists: Lists, path: Path = ()) -> Any:
    """A batch of no samples like another one; its tuples of samples are lists.

    Nothing can be noted of an empty tuple, because there is but one.

    Args:
        batch: of some samples.
        lists: where its lists with an entry for each sample are.
        path: where in the batch this is.

    Raises:
        IndexError, TypeError: there is something in it of which there is no empty one.
    """
    if path in lists:
        return []
    if batch is None or is_leaf(batch) or not isinstance(batch, dict | list | tuple):
        return batch if batch is None else _nothing_of(batch)
    kind: Any = type(batch)
    if isinstance(batch, dict):
        entries = {key: emptied(value, lists, (*path, key)) for key, value in batch.items()}
        return defaultdict(batch.default_factory, entries) if isinstance(batch, defaultdict) else kind(entries)
    made = [emptied(value, lists, (*path, number)) for number, value in enumerate(batch)]
    return kind(*made) if hasattr(batch, "_fields") else kind(made)


def _nothing_of(leaf: Any) -> Any:
    leading_size(leaf)
    return fresh(slice_batch(leaf, range(0)))


def lists_of(batch: Any, other: Any, path: Path = ()) -> Iterator[Path]:
    """Where lists and tuples are that are longer or shorter in a batch of another number of samples."""
    if isinstance(batch, dict) and isinstance(other, dict):
        for key in batch.keys() & other.keys():
            yield from lists_of(batch[key], other[key], (*path, key))
    elif isinstance(batch, list | tuple) and isinstance(other, list | tuple) and not is_text_list(batch):
        if len(batch) != len(other):
            yield path
            return
        for number, pair in enumerate(zip(batch, other, strict=True)):
            yield from lists_of(*pair, (*path, number))


def _sequences(batch: Any) -> Iterator[Any]:
    """All lists and tuples of a batch that are not texts or namedtuples."""
    if isinstance(batch, dict):
        for value in batch.values():
            yield from _sequences(value)
    elif isinstance(batch, list | tuple) and not is_text_list(batch):
        if not hasattr(batch, "_fields"):
            yield batch
        for value in batch:
            yield from _sequences(value)


def lengths(batch: Any) -> list[int]:
    """How long the lists and tuples of a batch are; that of an entry for each sample is another for one sample."""
    return [len(sequence) for sequence in _sequences(batch)]


def refuse_list_of_tensors(batch: Any, samples: int, replicas: int) -> None:
    """Refuses a list or tuple of as many tensors as there are samples, whose sizes say that they are not fields.

    Args:
        batch: of a loader that is read as it is.
        samples: of a full batch; 0 where that is not known, or where lists are known to hold fields.
        replicas: among which the batch would be cut.

    Raises:
        ValueError: there is such a list or tuple.
    """
    for sequence in _sequences(batch) if samples > 1 else ():
        tensors = all(isinstance(entry, torch.Tensor | np.ndarray) and entry.ndim for entry in sequence)
        if not tensors or len(sequence) != samples or len(sequence[0]) == samples:
            continue
        # Fields that a function returns as (x, y) are of other kinds, or have as many examples for each sample.
        kinds = {(entry.ndim, str(entry.dtype)) for entry in sequence}
        images = len(kinds) == 1 and sequence[0].ndim > 2 and len(sequence[0]) % samples
        if isinstance(sequence, list) or images:
            raise list_error(samples, replicas, type(sequence).__name__)


def list_error(samples: int, replicas: int, kind: str = "list") -> ValueError:
    """What is said of a batch in which a list has an entry for each sample: cutting these would cut every sample."""
    return ValueError(
        f"collate_fn returned a {kind} with an entry for each of {samples} samples, which cannot be split over "
        f"{replicas} replicas: every tensor of a batch is cut along its dimension 0. Return tensors with one row for "
        "each sample (torch.stack, padding, or torch.nested.nested_tensor), start one process for each replica, or "
        f"{BATCHES_OF_ITS_OWN}."
    )


def say_not_counted(found: int, samples: int) -> None:
    """Says once that a batch holds another number of examples than the samples that its share is weighed by."""
    warn_once(
        "examples that are not samples",
        f"collate_fn returned {found} examples for {samples} samples. The gradients of the replicas are weighed by "
        "their samples, so the result is not exactly the mean over the examples. Return as many examples for each "
        "sample, or divide the loss by the examples of the whole batch and call "
        "strategy.set_gradient_policy(scale='SUM').",
    )
