"""``tf.distribute.DistributedDataset``, and how a strategy makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tfstyle_dist.core.enums import InputReplicationMode
from tfstyle_dist.core.logging import get_logger, warn_once
from tfstyle_dist.input.agreement import SUBSET, check_same, subset_of
from tfstyle_dist.input.checks import not_of_a_loader, refuse, refuse_scalars
from tfstyle_dist.input.grouping import group
from tfstyle_dist.input.iterator import DistributedIterator
from tfstyle_dist.input.options import AutoShardPolicy, InputContext, InputOptions
from tfstyle_dist.input.pipeline import DealtPipeline, Pipeline, Step
from tfstyle_dist.input.prefetch import DevicePrefetcher
from tfstyle_dist.input.report import ShardReport, WorkerShare
from tfstyle_dist.input.request import Plan, Request
from tfstyle_dist.input.sharding import Layout
from tfstyle_dist.input.sources import make_plan
from tfstyle_dist.input.split import spec_of
from tfstyle_dist.runtime.context import current_replica
from tfstyle_dist.runtime.worker import Worker

_UNKNOWN_CARDINALITY = -2


class DistributedDataset:
    """A dataset divided among the replicas (``tf.distribute.DistributedDataset``).

    Each ``iter`` is one epoch; a shuffled dataset comes in a new order each time. ``len`` is the number of steps.

    Args:
        worker: replicas and group.
        plan: what this worker reads.
        options: how batches reach the replicas.
        asked: the policy that was asked for; ``None`` for a ``dataset_fn``.
        same: which samples it takes, if all workers must take the same ones.

    Attributes:
        recipe: makes it once more for the strategy object of another process.
    """

    recipe: Callable[[Any], DistributedDataset] | None = None

    def __init__(
        self, worker: Worker, plan: Plan, options: InputOptions, asked: AutoShardPolicy | None, same: str | None = None
    ) -> None:
        self.worker, self.pipeline, self._plan, self._options, self._asked = worker, plan.pipeline, plan, options, asked
        self.layout: Layout = plan.pipeline.layout
        self._next_epoch = 0
        self._spec: Any = None
        facts = {"kind": type(self.pipeline).__name__, **self.pipeline.facts(), SUBSET: same}
        check_same(worker, facts, compared=self.pipeline.same_on_all)
        if worker.positions is not None:
            worker.positions.add(self)
        self._announce()

    def __iter__(self) -> DistributedIterator:
        """Starts an epoch.

        Raises:
            ValueError: called inside ``strategy.run``.
        """
        self.require_outside("iter() of a distributed dataset")
        iterator = DistributedIterator(self, self._next_epoch)
        self._next_epoch += 1
        if self.worker.positions is not None:
            self.worker.positions.begins(self, iterator)
        return iterator

    def __len__(self) -> int:
        """Steps of an epoch.

        Raises:
            TypeError: the number is not known without reading.
        """
        steps = self.pipeline.steps_per_epoch()
        if steps is None or (self.layout.workers > 1 and not (self.pipeline.same_on_all or self.pipeline.compares)):
            raise TypeError(
                "The number of steps of this distributed dataset is not known in advance: what it reads has no length. "
                "Iterate over it, or give a map-style Dataset with global_batch_size=, a DataLoader over one (a batch "
                "sampler of your own needs __len__), or a list of batches."
            )
        return steps

    def __getattr__(self, name: str) -> Any:
        """Says what to write for what a ``DataLoader`` has and this has not.

        Raises:
            AttributeError: always; where a property of its own raised one, that.
        """
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        raise AttributeError(not_of_a_loader(type(self).__name__, name), name=name, obj=self)

    def __bool__(self) -> bool:
        """Always true, as in TensorFlow, so that ``if dataset:`` asks whether there is one."""
        return True

    @property
    def cardinality(self) -> int:
        """How many batches the dataset has: that which was given, or the first one that ``dataset_fn`` made here.

        -2, TensorFlow's ``UNKNOWN_CARDINALITY``, where this is not known without reading.

        Source: ``DistributedDataset.cardinality`` of TensorFlow.
        """
        number = self.pipeline.num_batches()
        return _UNKNOWN_CARDINALITY if number is None else number

    @property
    def element_spec(self) -> Any:
        """What a batch looks like: a nest of ``TensorSpec``; of ``PerReplica`` ones with several local replicas.

        The first time one step of an epoch is read and dropped.

        Raises:
            ValueError: the dataset is empty.
        """
        if self._spec is None:
            step = next(self.pipeline.begin(0, (0, 0)), None)
            if step is None:
                raise ValueError(
                    "This dataset gave no batch at all, so it has no element_spec; give one with at least one batch."
                )
            self._spec = group([spec_of(part) for part in step.parts], step.lists)
        return self._spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Folds all batches of an epoch; on all workers alike, outside of ``run``.

        Args:
            initial_state: the first state.
            reduce_func: called with the state and the next batch; returns the next state.

        Returns:
            The last state.

        Raises:
            ValueError: called inside ``strategy.run``.

        Example:
            >>> batches.reduce(0, lambda steps, batch: steps + 1)
            2

        Source: ``tf.data.Dataset.reduce``.
        """
        state = initial_state
        for batch in self:
            state = reduce_func(state, batch)
        return state

    def shard_report(self) -> ShardReport:
        """Who reads what; no communication.

        Returns:
            Which samples or files each worker reads, by which policy, and why; ``print`` shows it as a table.

        Example:
            >>> report = batches.shard_report()
        """
        workers = range(self.layout.workers)
        shares = [
            WorkerShare(
                w,
                self._plan.samples_of(self.layout.of_worker(w)),
                self._plan.files[w] if self._plan.files else (),
                self._plan.reads,
            )
            for w in workers
        ]
        plan = self._plan
        return ShardReport(self._asked, plan.policy, plan.batch_size, self.layout, shares, plan.notes)

    # ---- for the iterator -------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[torch.device | None]:
        """Where each local replica's batches go; ``None``: they stay where they are."""
        count = self.worker.num_local_replicas
        if not self._options.experimental_fetch_to_device or not self.worker.devices:
            return [None] * count
        return [self.worker.torch_device(r) for r in range(count)]

    def to_devices(self, steps: Iterator[Step]) -> Iterator[Step]:
        """``steps`` with their batches on the replicas' devices."""
        devices = [d for d in self.devices if d is not None and d.type != "cpu"]
        if not devices:
            return steps
        return DevicePrefetcher(steps, devices, self._options.experimental_per_replica_buffer_size)

    def continue_after(self, epoch: int) -> None:
        """The next ``iter`` is the epoch after ``epoch``."""
        self._next_epoch = epoch + 1

    def require_outside(self, what: str) -> None:
        """Raises ValueError in replica context."""
        if current_replica() is not None:
            raise ValueError(
                f"{what} must be called outside of strategy.run: each replica would take a batch of its own. Iterate "
                "outside and pass the batch: strategy.run(step, args=(batch,))."
            )

    def _announce(self) -> None:
        report = self.shard_report()
        if self.worker.group.rank == 0:
            get_logger().info("%s", report)
        for note in report.notes:
            warn_once(f"input: {note}", f"Input: {note}.")


def distribute(dataset: Any, request: Request, options: InputOptions | None) -> DistributedDataset:
    """Makes the distributed dataset of ``Strategy.experimental_distribute_dataset``.

    Args:
        dataset: a DataLoader, Dataset, or iterable of global batches.
        request: the options of the call.
        options: how batches reach the replicas.

    Raises:
        TypeError, ValueError, NotImplementedError, NotFoundError: see ``sources.make_plan`` and ``InputOptions.check``.
    """
    if isinstance(dataset, DistributedDataset) and request.worker.num_replicas > 1:
        raise TypeError(
            "experimental_distribute_dataset was given a DistributedDataset, which is divided among the replicas "
            "already: dividing it again would lose examples. Iterate over the one that you have."
        )
    options = _checked_options(options, from_function=False)
    alone = request.policy is AutoShardPolicy.OFF or request.worker.group.size == 1
    plan, subset = make_plan(dataset, request), None if alone else subset_of(dataset)
    return DistributedDataset(request.worker, plan, options, request.policy, subset)


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any], worker: Worker, options: InputOptions | None
) -> DistributedDataset:
    """Makes the distributed dataset of ``Strategy.distribute_datasets_from_function``.

    Args:
        dataset_fn: called once for each pipeline of this worker.
        worker: replicas and group.
        options: how batches reach the replicas.

    Raises:
        TypeError: ``dataset_fn`` is no function, or does not return a dataset.
        ValueError: it returns an unbatched map-style dataset.
    """
    options = _checked_options(options, from_function=True)
    if not callable(dataset_fn):
        raise TypeError(f"dataset_fn must be a function of an InputContext, got {type(dataset_fn).__name__}.")
    layout = Layout(worker.group.size, worker.group.rank, worker.num_local_replicas)
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        contexts = [
            InputContext(worker.num_replicas, worker.replica_id(r), worker.num_replicas) for r in range(layout.replicas)
        ]
    else:
        contexts = [InputContext(layout.workers, layout.worker, worker.num_replicas)]
    sources = [_checked(dataset_fn(context)) for context in contexts]
    pipeline: Pipeline = DealtPipeline(sources, layout, [_length(s) for s in sources])
    reads = f"reads {len(sources)} pipeline(s) of its own"
    return DistributedDataset(worker, Plan(pipeline, None, None, None, reads), options, None)


def _checked(dataset: Any) -> Any:
    refuse(dataset)
    refuse_scalars(dataset)
    if isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset):
        raise ValueError(
            f"dataset_fn returned an unbatched {type(dataset).__name__}; return DataLoader(dataset, batch_size="
            "context.get_per_replica_batch_size(global_batch_size))."
        )
    return dataset


def _length(source: Any) -> int | None:
    if isinstance(source, list):
        return len(source)
    if isinstance(source, DataLoader) and not isinstance(source.dataset, IterableDataset):
        try:
            return len(source)
        except TypeError:
            return None
    return None


def _checked_options(options: InputOptions | None, from_function: bool) -> InputOptions:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(
            f"options must be InputOptions, got {options!r}; write e.g. InputOptions(). How workers divide a dataset "
            "is auto_shard_policy= of experimental_distribute_dataset."
        )
    options = options or InputOptions()
    options.check(from_function)
    return options
