"""The programs' datasets: a chain of tf.data's operations over a list, a range or lines of files."""

from __future__ import annotations

import itertools

import numpy as np
import torch

import tfstyle_dist as td
from tfstyle_dist.input import FileDataset
from tfstyle_dist.input.sharding import resolve_policy, shard_files
from tfstyle_dist.input.split import map_leaves


def stacked(elements):
    """One batch of elements; texts become an array of str, because nests map over lists."""
    first = elements[0]
    if isinstance(first, dict):
        return {k: stacked([e[k] for e in elements]) for k in first}
    if isinstance(first, tuple):
        return tuple(stacked(column) for column in zip(*elements, strict=True))
    return torch.stack(elements) if isinstance(first, torch.Tensor) else np.stack([np.asarray(e) for e in elements])


def shard_elements(elements, num_shards, index):
    """Every ``num_shards``-th element, from number ``index`` (``tf.data.Dataset.shard``).

    Raises:
        InvalidArgumentError: ``num_shards`` is not positive, or ``index`` is not below it.
    """
    if num_shards < 1:
        raise td.errors.InvalidArgumentError(f"num_shards must be >= 1, got {num_shards}.")
    if not 0 <= index < num_shards:
        raise td.errors.InvalidArgumentError(
            f"index must be between 0 and num_shards - 1 = {num_shards - 1}, got index {index}."
        )
    return (element for number, element in enumerate(elements) if number % num_shards == index)


class Dataset:
    """A re-iterable source and the operations on it."""

    def __init__(self, source, operations=(), policy=td.AutoShardPolicy.AUTO, batch_size=None):
        self.source, self.operations, self.auto_shard_policy = source, operations, policy
        self.batch_size = batch_size

    # ---- what the package asks of a dataset that lists its files ----

    @property
    def files(self):
        return self.source.files if isinstance(self.source, FileDataset) else None

    def with_files(self, files):
        return Dataset(self.source.with_files(files), self.operations, self.auto_shard_policy, self.batch_size)

    # ---- tf.data ----

    def _then(self, operation, batch_size=None):
        size = batch_size or self.batch_size
        return Dataset(self.source, (*self.operations, operation), self.auto_shard_policy, size)

    def batch(self, n, drop_remainder=False):
        def batches(make):
            stream = make()
            while group := list(itertools.islice(stream, n)):
                if len(group) == n or not drop_remainder:
                    yield stacked(group)

        return self._then(batches, n)

    def shard(self, num, index):
        shard_elements((), num, index)
        return self._then(lambda make: shard_elements(make(), num, index))

    def repeat(self, n):
        return self._then(lambda make: itertools.chain.from_iterable(make() for _ in range(n)))

    def take(self, n):
        return self._then(lambda make: itertools.islice(make(), n))

    def map(self, fn):
        return self._then(lambda make: (fn(e) for e in make()))

    def with_auto_shard(self, policy):
        return Dataset(self.source, self.operations, policy, self.batch_size)

    def __iter__(self):
        make = lambda: iter(self.source)  # noqa: E731
        for operation in self.operations:
            make = lambda operation=operation, before=make: iter(operation(before))  # noqa: E731
        return make()


class Slices:
    """The rows of a nest of lists."""

    def __init__(self, data, dtype):
        as_tensor = lambda x: torch.tensor(x, dtype=dtype)  # noqa: E731
        if isinstance(data, dict):
            data = {k: as_tensor(v) for k, v in data.items()}
        else:
            data = tuple(map(as_tensor, data)) if isinstance(data, tuple) else as_tensor(data)
        self.data, sizes = data, []
        map_leaves(lambda leaf: sizes.append(len(leaf)), data)
        self.size = sizes[0]

    def __iter__(self):
        return (map_leaves(lambda leaf, row=row: leaf[row], self.data) for row in range(self.size))


def auto_shard(dataset, num_workers, index, policy):
    """What one of several workers sees of a dataset, element by element."""
    resolved = resolve_policy(policy, num_workers, dataset.files is not None, has_hint=False)
    if resolved is td.AutoShardPolicy.FILE:
        return dataset.with_files(shard_files(dataset.files, num_workers, index))
    return (
        dataset
        if resolved is td.AutoShardPolicy.OFF
        else dataset._then(lambda make: shard_elements(make(), num_workers, index))
    )
