"""Values and datasets of which every worker has its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from tfstyle_dist.core.errors import OutOfRangeError
from tfstyle_dist.input import Optional

_numbers = itertools.count(1)


class PerWorkerValues:
    """One value for each worker; a scheduled function gets that of the worker it runs on.

    Args:
        values: in the order of the workers.

    Attributes:
        values: in the order of the workers.

    Source: ``tf.distribute.coordinator.PerWorkerValue``.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def for_worker(self, index: int) -> Any:
        """The value of one worker."""
        if index >= len(self.values):
            raise ValueError(f"PerWorkerValues holds {len(self.values)} values, but this is worker {index}.")
        return self.values[index]


class PerWorkerResource:
    """Something that each worker makes for itself, once, and again when it was restarted.

    Args:
        factory: called on the worker.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory = factory
        self.number = next(_numbers)


class PerWorkerDataset(PerWorkerResource):
    """A dataset of which each worker has its own copy."""

    def __iter__(self) -> PerWorkerIterator:
        """An iterator on each worker; give it to ``schedule``."""
        return PerWorkerIterator(self)


class PerWorkerIterator(PerWorkerResource):
    """An iterator on each worker over its dataset."""

    def __init__(self, dataset: PerWorkerDataset) -> None:
        super().__init__(partial(_iterate, dataset))

    def __iter__(self) -> PerWorkerIterator:
        """Itself."""
        return self

    def __next__(self) -> Any:
        """Refused: the data is on the workers."""
        raise NotImplementedError(
            "The iterator of a per-worker dataset cannot be advanced here: its data is on the workers. Give it "
            "to schedule(fn, args=(iterator,)) and call next(iterator) in fn."
        )

    get_next = __next__


def returning(dataset: Any) -> Callable[[], Any]:
    """A function in place of which a dataset was given.

    Raises:
        TypeError: it cannot be iterated over.
    """
    if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise TypeError(
            "create_per_worker_dataset takes a function that returns a dataset, or a dataset, got "
            f"{dataset!r} ({type(dataset).__name__}). Give e.g. a DataLoader, or a function that makes one."
        )
    return partial(_itself, dataset)


def _itself(dataset: Any) -> Any:
    return dataset


def _iterate(dataset: Any) -> WorkerIterator:
    """On the worker, whose own dataset is given."""
    return WorkerIterator(iter(dataset))


class WorkerIterator:
    """On the worker: what ``next(iterator)`` in a scheduled function advances."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def get_next(self) -> Any:
        """The next element.

        Raises:
            OutOfRangeError: there is none.
        """
        try:
            return next(self._iterator)
        except StopIteration:
            raise OutOfRangeError(
                "The per-worker iterator is at its end: this worker has no more elements. Give iter(...) of the "
                "per-worker dataset anew for another epoch, or let dataset_fn return one that does not end."
            ) from None

    def get_next_as_optional(self) -> Optional:
        """The next element, or an ``Optional`` without a value after the last one."""
        knows: Any = self._iterator if hasattr(self._iterator, "element_spec") else None
        try:
            return Optional([next(self._iterator)], knows)
        except StopIteration:
            return Optional((), knows)
