"""Nested batches: their sizes, slices of them, and empty ones like them; which slice is whose, ``sharding`` says."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.input import layouts


@dataclass(frozen=True)
class TensorSpec:
    """What one leaf of a batch looks like.

    Attributes:
        shape: sizes of its dimensions, ``None`` for the batch and where the entries of a nested tensor differ.
        dtype: its torch or numpy dtype, or ``str`` for a list of texts.
    """

    shape: tuple[int | None, ...]
    dtype: Any


def is_text_list(value: Any) -> bool:
    """Whether ``value`` is a list of texts or bytes, which is what torch's collate makes of texts: one leaf."""
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(v, str | bytes) for v in value)


def map_leaves(fn: Callable[[Any], Any], batch: Any) -> Any:
    """``batch`` with ``fn`` applied to tensors, arrays, lists of texts and other objects, at any depth.

    Args:
        fn: takes one leaf.
        batch: a nest of tuples, lists, dicts, other mappings, and leaves. A mapping that is no dict is made again from
            a dict; one that cannot be made so becomes that dict, as a ``DataLoader`` does it.
    """
    if isinstance(batch, torch.Tensor | np.ndarray):
        return fn(batch)

    def leaf(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, Mapping):  # not a dict: e.g. what a tokenizer returns
            return _made_like(value, {k: map_leaves(fn, v) for k, v in value.items()})
        return fn(value)

    return torch_internals.pytree.tree_map(leaf, batch, is_leaf=is_leaf)


def leaves_of(batch: Any) -> list[Any]:
    """The leaves of ``batch`` that ``map_leaves`` would give to its function."""
    found: list[Any] = []
    for leaf in torch_internals.pytree.tree_leaves(batch, is_leaf=is_leaf):
        if isinstance(leaf, Mapping):
            found += [inner for value in leaf.values() for inner in leaves_of(value)]
        elif leaf is not None:
            found.append(leaf)
    return found


def _made_like(mapping: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    make: Any = type(mapping)
    try:
        made = make(entries)
        tensors = {key: entry for key, entry in entries.items() if isinstance(entry, torch.Tensor)}
        same = made.keys() == entries.keys() and all(made[key] is tensor for key, tensor in tensors.items())
        same = same and all(made[key] is not entries for key in entries)
    except (AttributeError, KeyError, TypeError):
        return entries
    return made if same else entries  # its class is made from something else


def is_leaf(value: Any) -> bool:
    """Whether ``value`` is no nest although it is a list or a tuple."""
    return isinstance(value, PackedSequence) or is_text_list(value)


def leading_size(batch: Any) -> int:
    """The number of examples: the common first dimension of all leaves.

    Args:
        batch: tensors of shape ``[batch, ...]`` (sparse COO and nested ones too), arrays, lists of texts, or a nest of
            them.

    Raises:
        IndexError: a leaf without a first dimension: the data are not batched.
        InvalidArgumentError: the first dimensions differ, or there is no leaf.
        TypeError: a leaf that cannot be split.
    """
    sizes = [_leaf_size(leaf) for leaf in leaves_of(batch)]
    if not sizes:
        raise InvalidArgumentError(f"A global batch must hold at least one tensor, got {batch!r}.")
    if any(size != sizes[0] for size in sizes):
        raise InvalidArgumentError(
            f"All parts of a global batch must have the same first dimension (the batch), got sizes {sizes}. "
            "Batch every part, e.g. in collate_fn."
        )
    return sizes[0]


def first_size(batch: Any) -> int | None:
    """The common first dimension of all leaves, as ``leading_size``; ``None`` where there is no such thing."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return None if batch.ndim == 0 else batch.size(0) if isinstance(batch, torch.Tensor) else int(batch.shape[0])
    if isinstance(batch, list | tuple) and (not batch or isinstance(batch[0], str | bytes)):
        return len(batch)
    entries: Iterable[Any] = ()
    if isinstance(batch, Mapping | list | tuple):
        entries = batch.values() if isinstance(batch, Mapping) else batch
    sizes = {first_size(entry) for entry in entries if entry is not None}
    return sizes.pop() if len(sizes) == 1 else None


def _leaf_size(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor | np.ndarray):
        if leaf.ndim == 0:
            raise IndexError(
                "Index 0 is out of range of a scalar: the dataset is not batched, so its elements cannot be split over "
                "several replicas. Batch it to the global batch size, e.g. DataLoader(dataset, batch_size=64) or "
                "global_batch_size=64."
            )
        if isinstance(leaf, torch.Tensor):
            layouts.check_divisible(leaf)
            return leaf.size(0)
        return int(leaf.shape[0])
    if isinstance(leaf, list | tuple) and not isinstance(leaf, PackedSequence):
        return len(leaf)
    if isinstance(leaf, bool | int | float | complex | str | bytes | np.generic):
        raise IndexError(
            f"Index 0 is out of range of the Python value {leaf!r}: it has no batch dimension, so it cannot be split "
            "over several replicas. Make it a tensor with one entry per example."
        )
    raise TypeError(
        f"A batch with a {type(leaf).__name__} cannot be split over several replicas. Return tensors, arrays or lists "
        f"of texts in tuples, lists or dicts from collate_fn, or {layouts.BATCHES_OF_ITS_OWN}."
    )


def slice_batch(batch: Any, piece: range) -> Any:
    """Examples ``piece`` of a batch, as views.

    Args:
        batch: see ``leading_size``.
        piece: consecutive examples; an empty range keeps structure, dtype and trailing shape.
    """
    start, stop = piece.start, max(piece.start, piece.stop)
    offsets: dict[int, torch.Tensor] = {}
    return map_leaves(
        lambda leaf: layouts.cut(leaf, start, stop, offsets) if isinstance(leaf, torch.Tensor) else leaf[start:stop],
        batch,
    )


def empty_like(batch: Any) -> Any:
    """A batch of no examples with the structure, dtypes and trailing shapes of ``batch``.

    Raises:
        IndexError, TypeError, InvalidArgumentError: see ``leading_size``.
    """
    leading_size(batch)
    return slice_batch(batch, range(0))


def fresh(empty: Any) -> Any:
    """Another empty batch like ``empty``, with containers and tensors of its own: a program may change what it gets."""
    return map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf[:], empty)


def is_scalar(batch: Any) -> bool:
    """Whether some leaf has no batch dimension."""
    scalars = bool | int | float | complex | str | bytes | np.generic
    return any(isinstance(leaf, scalars) or getattr(leaf, "ndim", 1) == 0 for leaf in leaves_of(batch))


def spec_of(batch: Any) -> Any:
    """A nest of ``TensorSpec`` like ``batch``, the first dimension left open."""

    def leaf(value: Any) -> TensorSpec:
        if isinstance(value, torch.Tensor | np.ndarray):
            shape = layouts.sizes(value) if isinstance(value, torch.Tensor) else value.shape
            return TensorSpec((None, *shape[1:]) if value.ndim else (), value.dtype)
        if isinstance(value, list | tuple) and not isinstance(value, PackedSequence):
            return TensorSpec((None,), type(value[0]))
        return TensorSpec((), type(value))

    return map_leaves(leaf, batch)


def describe(batch: Any) -> Any:
    """The structure of ``batch`` in JSON's types, so that a worker can tell it to one that has read nothing.

    Raises:
        TypeError: a leaf that is no tensor, array or list of texts.
    """
    if batch is None:
        return ["none"]
    if isinstance(batch, torch.Tensor) and not layouts.is_dense(batch):
        return layouts.describe(batch)
    if isinstance(batch, torch.Tensor):
        return ["tensor", str(batch.dtype).removeprefix("torch."), list(batch.shape[1:])]
    if isinstance(batch, np.ndarray):
        return ["array", batch.dtype.str, list(batch.shape[1:])]
    if is_text_list(batch):
        return ["texts"]
    if isinstance(batch, Mapping):
        return ["dict", [[k, describe(v)] for k, v in batch.items()]]
    if hasattr(batch, "_fields") and not is_leaf(batch):
        return ["named", [describe(v) for v in batch], type(batch).__name__, list(batch._fields)]
    if isinstance(batch, list | tuple) and not is_leaf(batch):
        return ["tuple" if isinstance(batch, tuple) else "list", [describe(v) for v in batch]]
    raise TypeError(f"The structure of a batch with a {type(batch).__name__} cannot be told to another worker.")


def from_description(text: Any) -> Any:
    """The empty batch that ``describe`` described; a namedtuple is one of a class of its own with the same fields."""
    kind, *rest = text
    if kind == "none":
        return None
    if kind == "tensor":
        return torch.empty((0, *rest[1]), dtype=getattr(torch, rest[0]))
    if kind in ("sparse", "nested", "jagged"):
        return layouts.from_description(kind, getattr(torch, rest[0]), rest[1:])
    if kind == "array":
        return np.empty((0, *rest[1]), dtype=rest[0])
    if kind == "texts":
        return []
    if kind == "dict":
        return {tuple(k) if isinstance(k, list) else k: from_description(v) for k, v in rest[0]}
    entries = [from_description(v) for v in rest[0]]
    if kind == "named":
        return namedtuple(rest[1], rest[2], rename=True)(*entries)
    return tuple(entries) if kind == "tuple" else entries
