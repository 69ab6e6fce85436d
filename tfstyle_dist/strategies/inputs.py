"""The methods of ``Strategy`` that divide datasets among the replicas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tfstyle_dist.core import nest
from tfstyle_dist.core.enums import InputReplicationMode
from tfstyle_dist.input import (
    ArrayDataset,
    AutoShardPolicy,
    DistributedDataset,
    DistributedIterator,
    DistributeOptions,
    InputContext,
    InputOptions,
    Request,
    distribute,
    distribute_from_function,
)
from tfstyle_dist.values import PerReplica, ValueContext

if TYPE_CHECKING:
    from tfstyle_dist.strategies.base import Strategy


def experimental_distribute_dataset(
    strategy: Strategy,
    dataset: Any,
    options: InputOptions | None = None,
    *,
    global_batch_size: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    drop_remainder: bool = False,
    auto_shard_policy: AutoShardPolicy | DistributeOptions = AutoShardPolicy.AUTO,
    **loader_options: Any,
) -> DistributedDataset:
    """Divides a dataset of global batches among the replicas; on all workers alike.

    A map-style dataset, also that of a plain ``DataLoader``, is read by share: each sample is loaded by the one
    worker that needs it. A shuffled one comes in a new order each epoch, the same for any number of replicas.

    Args:
        dataset: a ``DataLoader`` whose ``batch_size`` is the global batch size, an iterable of global batches, or,
            with ``global_batch_size``, a map-style ``Dataset`` or an ``IterableDataset`` of samples.
        options: how batches reach the replicas.
        global_batch_size: samples of all replicas together in one step.
        shuffle: shuffles a map-style dataset anew in each epoch.
        seed: of the order; default: drawn from torch's random numbers on worker 0.
        drop_remainder: leaves out a last batch that is smaller.
        auto_shard_policy: how the workers divide the dataset; a policy, or the ``DistributeOptions`` that hold it.
        **loader_options: ``num_workers``, ``collate_fn``, ``pin_memory``, ... of ``DataLoader``.

    Returns:
        An iterable of batches: the local batch itself with one local replica, else nests of ``PerReplica``. Every
        replica gets ceil(batch / replicas) examples, the last ones fewer or none.

    Raises:
        TypeError: not a dataset, or one without a length where one is needed.
        ValueError: an unbatched dataset, or one that is already sharded.
        NotFoundError: ``FILE`` or ``HINT`` with a dataset that cannot do that.
        InvalidArgumentError: fewer files than workers, a batch smaller than the replicas with ``drop_remainder``,
            or workers that were given different datasets.
        NotImplementedError: ``options`` ask for one pipeline for each replica; that is for
            ``distribute_datasets_from_function``.

    Example:
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)
        >>> for batch in strategy.experimental_distribute_dataset(loader):
        ...     strategy.run(step, args=(batch,))
    """
    if isinstance(auto_shard_policy, DistributeOptions):
        auto_shard_policy = auto_shard_policy.auto_shard_policy
    request = Request(
        strategy.worker, auto_shard_policy, global_batch_size, shuffle, seed, drop_remainder, dict(loader_options)
    )
    made = distribute(dataset, request, options)
    made.recipe = partial(
        experimental_distribute_dataset, dataset=dataset, options=options, global_batch_size=global_batch_size,
        shuffle=shuffle, seed=seed, drop_remainder=drop_remainder, auto_shard_policy=auto_shard_policy,
        **loader_options,
    )  # fmt: skip
    return made


def distribute_datasets_from_function(
    strategy: Strategy, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
) -> DistributedDataset:
    """A distributed dataset of pipelines that the user divides; nothing is split or sharded.

    Args:
        dataset_fn: called once for each input pipeline of this worker with its ``InputContext``; returns an
            iterable of per-replica batches (a ``DataLoader``, an ``IterableDataset``, a list).
        options: how batches reach the replicas, and whether there is one pipeline for each replica.

    Returns:
        An iterable: with L local replicas the r-th of every L consecutive batches goes to replica r. Replicas or
        workers that run out get empty batches until all have.

    Raises:
        TypeError: ``dataset_fn`` is no function, or returns no dataset.
        ValueError: it returns an unbatched map-style dataset.

    Example:
        >>> def dataset_fn(context):
        ...     shard = samples[context.input_pipeline_id :: context.num_input_pipelines]
        ...     return DataLoader(shard, batch_size=context.get_per_replica_batch_size(64))
        >>> batches = strategy.distribute_datasets_from_function(dataset_fn)
    """
    made = distribute_from_function(dataset_fn, strategy.worker, options)
    made.recipe = partial(distribute_datasets_from_function, dataset_fn=dataset_fn, options=options)
    return made


def experimental_distribute_datasets_from_function(
    strategy: Strategy, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
) -> DistributedDataset:
    """The older name of ``distribute_datasets_from_function``."""
    return strategy.distribute_datasets_from_function(dataset_fn, options)


def experimental_make_numpy_dataset(strategy: Strategy, numpy_input: Any, session: Any = None) -> ArrayDataset:
    """A dataset of the samples of arrays that every worker holds.

    Args:
        numpy_input: a nest of arrays of one length.
        session: accepted for TF's signature.

    Returns:
        A map-style dataset; to be given to ``experimental_distribute_dataset`` with ``global_batch_size``.

    Raises:
        ValueError: arrays of different lengths.

    Example:
        >>> dataset = strategy.experimental_make_numpy_dataset((images, labels))
        >>> strategy.experimental_distribute_dataset(dataset, global_batch_size=64)

    Source: ``tf.compat.v1.distribute.Strategy.experimental_make_numpy_dataset``.
    """
    return ArrayDataset(numpy_input)


def make_dataset_iterator(strategy: Strategy, dataset: Any) -> DistributedIterator:
    """The older form of ``iter(experimental_distribute_dataset(dataset))``.

    Args:
        dataset: as there; its batches are global ones.

    Returns:
        An iterator over one epoch.

    Source: ``tf.compat.v1.distribute.Strategy.make_dataset_iterator``.
    """
    return iter(strategy.experimental_distribute_dataset(dataset))


def make_input_fn_iterator(
    strategy: Strategy,
    input_fn: Callable[[InputContext], Any],
    replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
) -> DistributedIterator:
    """The older form of ``iter(distribute_datasets_from_function(input_fn))``.

    Args:
        input_fn: called with an ``InputContext``, returns an iterable of per-replica batches.
        replication_mode: whether it is called once for each worker or once for each replica.

    Returns:
        An iterator over one epoch.

    Source: ``tf.compat.v1.distribute.Strategy.make_input_fn_iterator``.
    """
    options = InputOptions(experimental_replication_mode=replication_mode)
    return iter(strategy.distribute_datasets_from_function(input_fn, options))


def experimental_run(
    strategy: Strategy, fn: Callable[..., Any], input_iterator: DistributedIterator | None = None
) -> Any:
    """The older form of ``run(fn, args=(next(input_iterator),))``.

    Args:
        fn: called on each replica, with the batch if there is an iterator.
        input_iterator: of ``make_dataset_iterator`` or ``make_input_fn_iterator``; ``None``: without arguments.

    Returns:
        What ``run`` returns.

    Raises:
        StopIteration: the epoch is over.
        Exception: as ``run``.

    Source: ``tf.compat.v1.distribute.Strategy.experimental_run``.
    """
    arguments = () if input_iterator is None else (next(input_iterator),)
    return strategy.run(fn, args=arguments)


def experimental_distribute_values_from_function(strategy: Strategy, value_fn: Callable[[ValueContext], Any]) -> Any:
    """Builds a ``PerReplica`` from a function of the replica's number.

    Args:
        value_fn: called once for each local replica, in order, with a ``ValueContext``.

    Returns:
        A nest of ``PerReplica``, also for one replica; the bare value under ``OneDeviceStrategy`` and the default
        strategy.

    Raises:
        AssertionError: the replicas' nests have different structures.
        TypeError: ``value_fn`` cannot be called.

    Example:
        >>> strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        PerReplica:{
          0: 0,
          1: 1
        }
    """
    if not callable(value_fn):
        raise TypeError(
            f"experimental_distribute_values_from_function takes a function of a ValueContext, got {value_fn!r}; write "
            "e.g. lambda context: context.replica_id_in_sync_group."
        )
    count = strategy.worker.num_local_replicas
    nests = []
    for replica in range(count):
        context = ValueContext(strategy.worker.replica_id(replica), strategy.num_replicas_in_sync)
        nests.append(value_fn(context))
    if not strategy.distributes:
        return nests[0]
    leaves, spec = nest.assert_same_structure(nests, "values")
    return nest.unflatten([PerReplica(entries) for entries in zip(*leaves, strict=True)], spec)
