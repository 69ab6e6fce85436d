"""What is refused as a dataset or as a batch size, and what to write instead."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.input.options import AutoShardPolicy, whole_number
from tfstyle_dist.input.sharding import Layout


def refuse(dataset: Any) -> None:
    """Raises TypeError for what is not a dataset, with what to write instead."""
    what = type(dataset).__name__
    if isinstance(dataset, torch.Tensor | np.ndarray | tuple | Mapping | str | bytes):
        raise TypeError(
            f"A {what} is not a dataset of batches. Pass torch.utils.data.TensorDataset(...) with global_batch_size=, "
            "a DataLoader, or a list of batches."
        )
    if isinstance(dataset, itertools.cycle | itertools.chain | itertools.repeat):
        raise TypeError(
            f"A {what} has no epochs that could begin anew. Distribute the DataLoader or list that it repeats; for "
            "steps without an end, as of TensorFlow's repeat(), repeat what you get: "
            "itertools.chain.from_iterable(itertools.repeat(batches))."
        )
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"A {what} can be read only once, so a second epoch would be empty. Give an object whose __iter__ starts "
            "anew: a DataLoader, a list, or instead of what a generator function f() returns an object of a class with "
            "def __iter__(self): return f().",
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


def refuse_sharded(loader: DataLoader[Any]) -> None:
    """Raises ValueError for a loader with a sampler that keeps one of several shares."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    for sampler in (loader.sampler, loader.batch_sampler, inner, getattr(inner, "sampler", None)):
        if isinstance(sampler, DistributedSampler) or _shards(sampler):
            raise ValueError(
                f"This DataLoader has a {type(sampler).__name__}, so it is already sharded; sharding it again would "
                "lose samples. Remove the sampler (shuffle=True shuffles alike on all workers), or hand the loader "
                "over in strategy.distribute_datasets_from_function."
            )


def _shards(sampler: Any) -> bool:
    """Whether a sampler says which one it is of several."""
    counts = [getattr(sampler, name, None) for name in ("num_replicas", "world_size", "num_shards")]
    several = any(isinstance(count, int) and count > 1 for count in counts)
    return several and isinstance(getattr(sampler, "rank", None), int)


def own_reading(kind: type[DataLoader[Any]]) -> str:
    """The name of a method by which a subclass of DataLoader makes batches in its own way; empty for none."""
    if kind.__module__.startswith("torchdata."):  # these give the same batches
        return ""
    for cls in kind.__mro__[: kind.__mro__.index(DataLoader)]:
        for name in vars(cls).keys() & vars(DataLoader).keys():
            if name == "__iter__" or (name.startswith("_") and not name.startswith("__")):
                return name
    return ""


def batches_of(loader: DataLoader[Any]) -> int | None:
    """How many batches a DataLoader says it has; ``None`` where it does not know, or reads what may have fewer."""
    unsure = own_reading(type(loader)) and type(loader).__len__ is DataLoader.__len__
    if unsure or isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except Exception:  # a batch sampler without a length, or that does not know it yet
        return None


def refuse_indices(dataset: Any, policy: AutoShardPolicy, workers: int) -> None:
    """Raises ValueError for a dataset with indices under a policy that deals out streams."""
    own_stream = policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT) and workers > 1
    if own_stream and not isinstance(dataset, IterableDataset):
        raise ValueError(
            f"AutoShardPolicy.{policy.name} deals out streams, but {type(dataset).__name__} has indices. Use "
            "AutoShardPolicy.DATA, which reads each sample on one worker only, or an IterableDataset."
        )


def check_batch_size(size: Any, drop_remainder: bool, layout: Layout) -> int:
    """Refuses a global batch size that is no positive whole number, or too small to reach every replica.

    Args:
        size: what the user gave.
        drop_remainder: whether smaller batches are dropped: then every batch should reach all replicas.
        layout: numbers of workers and replicas.

    Returns:
        It as an ``int``.

    Raises:
        TypeError: not a whole number.
        ValueError: less than 1.
        InvalidArgumentError: smaller than the number of replicas, with ``drop_remainder``.
    """
    number = whole_number(size, "global_batch_size")
    if number < 1:
        raise ValueError(f"global_batch_size must be at least 1, got {number}.")
    if drop_remainder and number < layout.all_replicas:
        raise InvalidArgumentError(
            f"A global batch of {number} is smaller than the {layout.all_replicas} replicas, so some replicas would "
            "never get an example although smaller batches are dropped. Use a larger global batch, or fewer replicas, "
            "or do not drop the remainder."
        )
    return number


_ORDER = (
    "Leave the line out: each iter() of it is an epoch in a new order if the dataset is shuffled (shuffle=True of the "
    "DataLoader that you give), and each replica gets its own share without a DistributedSampler."
)
_KEEP = "Keep the DataLoader that you gave to experimental_distribute_dataset in a variable, and ask that one"
_LOADER = "Do that to what you give to experimental_distribute_dataset"
_WORDS = {
    "batch": f"{_LOADER}: DataLoader(dataset, batch_size=...), of all replicas together.",
    "shuffle": f"{_LOADER}: DataLoader(dataset, batch_size=..., shuffle=True).",
    "map": f"{_LOADER}: in the dataset's __getitem__, or in collate_fn of the DataLoader.",
    "prefetch": "Leave the line out: num_workers of the DataLoader that you give reads ahead.",
    "cache": "Leave the line out: a dataset of PyTorch keeps what it keeps.",
    "take": "Write itertools.islice(dataset, count) in the loop over it.",
    "repeat": "Write a loop over epochs: each iter() of it begins anew.",
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "set_epoch": _ORDER,
    "dataset": f"{_KEEP}: len(loader.dataset) counts the examples of all replicas together.",
    "batch_size": f"{_KEEP}: loader.batch_size is that of all replicas together, or of one where your function "
    "returned the loader; a share has len(x) examples.",
    **dict.fromkeys(("collate_fn", "drop_last", "generator", "num_workers", "pin_memory"), f"{_KEEP}."),
}
"""What to write instead of what scripts ask a ``DataLoader`` for."""


def not_of_a_loader(kind: str, name: str) -> str:
    """What is said about an attribute that a distributed dataset has not."""
    said = f"{kind!r} object has no attribute {name!r}"
    return f"{said}: it is no DataLoader and no tf.data.Dataset. {_WORDS[name]}" if name in _WORDS else said
