"""Batches that cannot be cut, such as lists of images or graphs: ``collate_fn`` makes one of each replica's samples."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.input.examples import emptied, lengths, lists_of, no_empty_one, say_not_counted
from tfstyle_dist.input.grouping import Lists, Path
from tfstyle_dist.input.options import AutoShardPolicy
from tfstyle_dist.input.sampler import random_numbers_of
from tfstyle_dist.input.sharding import Layout, steps_of_batch
from tfstyle_dist.input.split import first_size, fresh, is_text_list, leading_size
from tfstyle_dist.runtime.random_streams import python_state, set_python_state

_PARTS = "tfstyle_dist: the batches of a worker's replicas"


@dataclass(frozen=True)
class ShareOf:
    """How many of the samples that a worker reads for a step each of its replicas gets.

    Attributes:
        batch_size: samples of a global batch.
        layout: numbers of workers and replicas.
        policy: ``DATA`` or ``OFF``; with one worker any.
    """

    batch_size: int
    layout: Layout
    policy: AutoShardPolicy

    def __call__(self, samples: int) -> tuple[int, ...] | None:
        """The numbers of samples; ``None`` where batches of two sizes give this worker as many in different ways."""
        return _sizes_of(self, samples)


@lru_cache(maxsize=256)
def _sizes_of(share: ShareOf, samples: int) -> tuple[int, ...] | None:
    most = samples if share.layout.workers == 1 else share.batch_size
    steps = [
        tuple(len(piece) for piece in step.pieces)
        for size in range(samples, most + 1)
        for step in steps_of_batch(size, share.batch_size, share.layout, share.policy)
    ]
    found = {sizes for sizes in steps if sum(sizes) == samples}
    return found.pop() if len(found) == 1 else None


def gives_samples(dataset: Any) -> bool:
    """Whether what is read of a dataset for several indices is known to be a list of samples, not of their fields."""
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    several = getattr(dataset, "__getitems__", None)
    return several is None or type(dataset).__module__ == "datasets.arrow_dataset"


class PieceCollate:
    """A collate function for several replicas: the whole batch where it can be cut, else one for each replica.

    What the first batch is decides for the later ones, in each process that collates. No sample is read for that, and
    ``collate`` is called for a batch that is cut as often as without this.

    Args:
        collate: makes a batch of a list of samples.
        sizes_of: says how many of so many samples each replica gets; ``None`` where that is not known here.

    Attributes:
        lists: where a batch that is not cut has lists with an entry for each sample; ``None``: it is cut.
        empty: a batch of no samples, where one was needed.
        whole: whether a batch was cut, so that the others are.
    """

    def __init__(self, collate: Callable[[Any], Any], sizes_of: ShareOf) -> None:
        self.collate, self._sizes_of = collate, sizes_of
        self.whole = False
        self.lists: Lists | None = None
        self.empty: Any = None

    def __call__(self, samples: Any) -> Any:
        """The batch, or what ``parts_of`` makes the replicas' batches of."""
        if self.lists is None:
            if self.whole or not isinstance(samples, list | tuple):
                return self.collate(samples)
            kept, restore = copied(samples), _random_numbers()  # collate functions write to samples
            batch = self.collate(samples)
            if self._can_be_cut(batch, kept):
                return batch
            restore()
            samples = kept
        sizes = self._sizes_of(len(samples))
        parts = samples if sizes is None else self._cut(samples, sizes)
        return {_PARTS: parts, "sizes": sizes, "samples": len(samples), "lists": self.lists}

    def _can_be_cut(self, batch: Any, samples: Sequence[Any]) -> bool:
        count, sizes, found = len(samples), lengths(batch), _examples_of(batch)
        can, other = found == count, None
        if found is not None and found > count and self._sizes_of.batch_size < self._sizes_of.layout.all_replicas:
            return True  # a sample is a batch of its own: there are too few for all replicas, which is refused
        if not can or count in sizes:  # these may be lists of samples
            other = self._another(samples[:1] if count > 1 else [*samples, *samples])
            can = can and (other is None or sizes == lengths(other))
        if not can:
            self.lists = frozenset(lists_of(batch, other) if other is not None else _lists_of_length(batch, count))
        else:
            self.whole = count > 1  # what one sample has may be one by chance
        return can

    def _another(self, samples: Sequence[Any]) -> Any:
        """A batch of another number of samples; ``None`` where the function does not take so many."""
        with random_numbers_of(0):
            try:
                return self.collate(list(copied(samples)))
            except Exception:
                return None

    def _cut(self, samples: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        shares = [samples[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        try:
            return [self.collate(list(share)) if share else None for share in shares]
        except Exception as error:
            error.add_note(
                f"collate_fn was called for the {len(samples)} samples in shares of {list(sizes)}, by replica, "
                "because what it makes of all of them cannot be cut. Let it take any number of samples."
            )
            raise

    def samples_of(self, batch: Any) -> int | None:
        """The samples of what this gave, perhaps in another process; ``None``: a batch that is cut."""
        if type(batch) is dict and _PARTS in batch:
            self.lists = batch["lists"]
            return int(batch["samples"])
        return None

    def parts_of(self, batch: Any, sizes: Sequence[int], some_empty: Callable[[], bool]) -> list[Any]:
        """The replicas' batches.

        Args:
            batch: what this gave, of which ``samples_of`` knows the samples.
            sizes: the samples of each replica.
            some_empty: whether a later batch leaves a replica without samples.

        Raises:
            IndexError, TypeError: a replica has no sample, now or later, and there is no batch of none.
            ValueError: the dataset gave another number of samples.
        """
        if batch["samples"] != sum(sizes):
            raise ValueError(
                f"The dataset gave {batch['samples']} samples for {sum(sizes)} indices, so it is not known which of "
                f"them each of {len(sizes)} replicas gets. Return one sample for each index from __getitems__, or "
                "start one process for each replica."
            )
        parts = batch[_PARTS] if batch["sizes"] is not None else self._cut(batch[_PARTS], sizes)
        parts = [part for part, size in zip(parts, sizes, strict=True) if size]
        self._count([size for size in sizes if size], parts)
        if self.empty is None and (len(parts) < len(sizes) or some_empty()):
            with no_empty_one():
                self.empty = emptied(parts[0], self.lists or frozenset())
        rest = iter(parts)
        return [next(rest) if size else fresh(self.empty) for size in sizes]

    def _count(self, sizes: Sequence[int], parts: Sequence[Any]) -> None:
        """Says where a replica's batch, of which no list holds samples, has another number of examples."""
        for part, size in zip(parts, sizes, strict=True) if not self.lists else ():
            if (found := first_size(part)) is not None and found % size:
                say_not_counted(found, size)


def _lists_of_length(batch: Any, count: int, path: Path = ()) -> Iterator[Path]:
    """Where lists and tuples of this length are; for functions that take no other number of samples."""
    if isinstance(batch, dict):
        for key, value in batch.items():
            yield from _lists_of_length(value, count, (*path, key))
    elif isinstance(batch, list | tuple) and not is_text_list(batch):
        if len(batch) == count:
            yield path
            return
        for number, value in enumerate(batch):
            yield from _lists_of_length(value, count, (*path, number))


def _examples_of(batch: Any) -> int | None:
    """The examples of a batch that can be cut."""
    try:
        return leading_size(batch)
    except (IndexError, TypeError, InvalidArgumentError):
        return None


def copied(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Samples to which a collate function may write: their lists, tuples and dicts, tensors and arrays are others.

    Any other object is the same one: it may own a file, be looked for by its identity, or hold a whole dataset.

    Args:
        value: the samples.
        known: what was copied already, by ``id``: samples may hold each other, or one tensor.
    """
    known, kind = {} if known is None else known, type(value)
    if id(value) in known:
        return known[id(value)]
    made: Any = value
    if kind is list:
        made = known[id(value)] = []
        made += [copied(entry, known) for entry in value]
    elif kind in (dict, OrderedDict):
        made = known[id(value)] = kind()
        made.update((key, copied(entry, known)) for key, entry in value.items())
    elif isinstance(value, tuple) and (kind is tuple or hasattr(value, "_fields")):
        entries = [copied(entry, known) for entry in value]
        made = tuple(entries) if kind is tuple else kind(*entries)
    elif kind is torch.Tensor:
        made = value.detach().clone().requires_grad_(value.requires_grad)
    elif kind is np.ndarray:
        made = value.copy()
    known[id(value)] = made
    return made


def _random_numbers() -> Callable[[], None]:
    """What sets the global random numbers of torch, Python and numpy back to where they are now."""
    python, cpu = python_state(), torch.get_rng_state()

    def restore() -> None:
        set_python_state(python)
        torch.set_rng_state(cpu)

    return restore
