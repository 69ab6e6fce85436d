"""What ``fit``, ``evaluate`` and ``predict`` take besides Keras' own kinds of data: distributed datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfstyle_dist.input.dataset import DistributedDataset
from tfstyle_dist.input.options import InputContext
from tfstyle_dist.integrations.keras.backend import DataAdapter
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy


class DatasetCreator:
    """A function that makes the data of ``fit``, ``evaluate`` and ``predict``, for every strategy.

    Under ``ParameterServerStrategy`` each worker calls it for ``fit`` and reads its dataset again from the beginning
    when it ends; the chief's program calls it for validation, ``evaluate`` and ``predict``. Under the other strategies
    it makes a dataset of ``Strategy.distribute_datasets_from_function``: each worker calls it once, and each replica
    takes a batch of its own; the dataset must last for the steps of all epochs. The number of steps must be given.

    Args:
        dataset_fn: called with an ``InputContext`` (``num_input_pipelines`` workers, this one is
            ``input_pipeline_id``); returns an iterable of batches ``(x, y)`` or ``(x, y, sample_weight)``.
        input_options: ``InputOptions`` of ``distribute_datasets_from_function``; parameter servers need none.

    Raises:
        TypeError: ``dataset_fn`` cannot be called.

    Example:
        >>> model.fit(DatasetCreator(dataset_fn), epochs=5, steps_per_epoch=100)

    Source: ``tf.keras.utils.experimental.DatasetCreator``.
    """

    def __init__(self, dataset_fn: Callable[[InputContext], Any], input_options: Any = None) -> None:
        if not callable(dataset_fn):
            raise TypeError(f"dataset_fn must be a function of an InputContext, got {type(dataset_fn).__name__}.")
        self.dataset_fn, self.input_options = dataset_fn, input_options

    def __call__(self, context: InputContext) -> Any:
        """The dataset of one worker."""
        return self.dataset_fn(context)


class Batches(DataAdapter):  # type: ignore[misc]
    """Keras' adapter for batches that are there already: of a distributed dataset, or of a ``DatasetCreator``.

    The batch from which Keras builds a model is the first one of the loop too: a stream cannot be read again.

    Args:
        source: an iterable of batches.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source
        self._builds, self._kept = True, list[Any]()
        self._rest: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        if self._builds:
            self._rest = iter(self.source)
            for place, batch in enumerate(self._rest):
                self._kept = [] if place else [batch]
                yield batch
            return
        kept, self._kept = self._kept, []
        yield from kept
        yield from self._rest if kept else iter(self.source)

    def get_torch_dataloader(self) -> Iterable[Any]:
        """One pass over the data."""
        return self

    def on_epoch_end(self) -> None:
        """Keras calls it first when the model is built, after no batch or one."""
        self._builds = False

    @property
    def num_batches(self) -> int | None:
        """Global batches of an epoch, when known."""
        try:
            return len(self.source)  # type: ignore[arg-type]
        except TypeError:
            return None

    batch_size = None
    has_partial_batch = None
    partial_batch_size = None


def as_batches(strategy: Strategy | None, x: Any, steps: Any, alone: bool = False, **beside: Any) -> Any:
    """The adapter of a distributed dataset or a ``DatasetCreator``; any other data as it is.

    Args:
        strategy: of the model.
        x: what a method was given.
        steps: how many to take.
        alone: this worker computes without the others.
        beside: what the method was given besides, by name.

    Raises:
        ValueError: the number of steps is missing, something was given that belongs into the dataset, or the dataset
            is of another strategy.
    """
    if not isinstance(x, DatasetCreator | DistributedDataset):
        return x
    kind = type(x).__name__
    for name, value in beside.items():
        if value is not None:
            raise ValueError(
                f"{name} was given beside a {kind}, which gives whole batches. Let the dataset give "
                "batches (x, y) or (x, y, sample_weight), and leave it out."
            )
    if strategy is None or alone:
        why = "belongs to no strategy" if strategy is None else "computes on the chief alone inside of a callback"
        raise ValueError(
            f"x is a {kind}, but the model {why}: give arrays, a DataLoader or a PyDataset, or build and compile the "
            "model in strategy.scope() and call the method outside of callbacks."
        )
    if isinstance(x, DistributedDataset):
        if x.worker is not strategy.worker:
            raise ValueError(
                f"x is a {kind} of another strategy than the model's {strategy!r}. Distribute it with that one: "
                "strategy.experimental_distribute_dataset(dataset)."
            )
        return Batches(x)
    if not steps:
        raise ValueError(
            "A DatasetCreator needs the number of steps, since its datasets may have no end: give steps_per_epoch= to "
            "fit, validation_steps= for validation_data, steps= to evaluate and predict."
        )
    if isinstance(strategy, ParameterServerStrategy):
        return Batches(x.dataset_fn(InputContext(1, 0, 1)))
    return Batches(strategy.distribute_datasets_from_function(x.dataset_fn, x.input_options))
