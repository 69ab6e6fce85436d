"""Who gets what: pure functions of the policy and of the numbers of workers and replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tfstyle_dist.core.errors import InvalidArgumentError, NotFoundError
from tfstyle_dist.input.options import AutoShardPolicy

T = TypeVar("T")
Pieces = tuple[range, ...]
"""The examples of one global batch for one step of one worker: a range for each of its replicas."""


@dataclass(frozen=True)
class Layout:
    """Where one worker stands.

    Attributes:
        workers: number of worker processes W.
        worker: number of this one.
        replicas: replicas of each worker L.
    """

    workers: int = 1
    worker: int = 0
    replicas: int = 1

    @property
    def all_replicas(self) -> int:
        """Replicas in sync, W * L."""
        return self.workers * self.replicas

    def of_worker(self, worker: int) -> Layout:
        """The same for another worker."""
        return Layout(self.workers, worker, self.replicas)


def chunks(size: int, replicas: int, full_size: int | None = None) -> list[range]:
    """Cuts a batch into consecutive pieces of equal size, as TensorFlow does.

    Args:
        size: examples in the batch.
        replicas: number of pieces.
        full_size: size of a full batch; given, a smaller last batch is cut into pieces of the full batch's size.

    Returns:
        ``replicas`` ranges; the last ones may be shorter or empty.

    Example:
        >>> [len(c) for c in chunks(5, 4)]
        [2, 2, 1, 0]
        >>> [len(c) for c in chunks(2, 2)], [len(c) for c in chunks(2, 2, full_size=4)]
        ([1, 1], [2, 0])
    """
    whole = size if full_size is None else max(size, full_size)
    step = -(-whole // replicas)
    return [range(min(i * step, size), min((i + 1) * step, size)) for i in range(replicas)]


def steps_of_batch(size: int, full_size: int, layout: Layout, policy: AutoShardPolicy) -> list[Pieces]:
    """What one worker takes out of one batch of the stream that it reads.

    Under ``DATA`` (and with one worker) a batch is one step. Its pieces go to the workers in turn: piece k to worker
    k mod W. Under the other policies a worker keeps all pieces of its own stream, L in each step; steps in which it
    would have nothing are left out.

    Args:
        size: examples in the batch.
        full_size: size of a full batch.
        layout: numbers of workers and replicas.
        policy: ``OFF``, ``FILE``, ``DATA`` or ``HINT``; see ``resolve_policy``.

    Returns:
        For each step one range for each local replica.
    """
    own_size = policy is AutoShardPolicy.DATA
    pieces = chunks(size, layout.all_replicas, None if own_size else full_size)
    if policy is AutoShardPolicy.DATA:
        return [tuple(pieces[layout.worker :: layout.workers])]
    steps = [tuple(pieces[i : i + layout.replicas]) for i in range(0, len(pieces), layout.replicas)]
    while len(steps) > 1 and not any(len(p) for p in steps[-1]):
        steps.pop()
    return steps


def resolve_policy(policy: AutoShardPolicy, workers: int, has_files: bool, has_hint: bool) -> AutoShardPolicy:
    """The policy that holds for a dataset: ``AUTO`` becomes ``FILE`` or ``DATA``.

    Args:
        policy: what the user asked for.
        workers: number of workers; with one nothing is refused.
        has_files: whether the dataset lists its files.
        has_hint: whether it has ``shard(num_shards, index)``.

    Raises:
        NotFoundError: ``FILE`` or ``HINT`` and the dataset cannot do that.
    """
    if policy is AutoShardPolicy.AUTO:
        return AutoShardPolicy.FILE if has_files else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE and workers > 1 and not has_files:
        raise NotFoundError(
            "Found an unshardable source dataset: AutoShardPolicy.FILE needs a dataset that lists its files (attribute "
            "`files`, method `with_files(files)`, e.g. tfstyle_dist.input.FileDataset). Use AutoShardPolicy.DATA or "
            "OFF."
        )
    if policy is AutoShardPolicy.HINT and workers > 1 and not has_hint:
        raise NotFoundError(
            "Found an unshardable source dataset: AutoShardPolicy.HINT needs a dataset with a method "
            "shard(num_shards, index). Use AutoShardPolicy.DATA or OFF."
        )
    return policy


def check_files(files: Sequence[T], workers: int) -> None:
    """Refuses fewer files than workers.

    Raises:
        InvalidArgumentError: under ``FILE`` some worker would have nothing to read.
    """
    if len(files) < workers:
        raise InvalidArgumentError(
            f"This dataset has {len(files)} file(s) for {workers} workers; file based sharding needs at least one file "
            "for each worker. Use more files, or AutoShardPolicy.DATA."
        )


def shard_files(files: Sequence[T], workers: int, worker: int) -> list[T]:
    """The files of one worker: every W-th one.

    Args:
        files: all files, in the same order everywhere.
        workers: number of workers.
        worker: which one.

    Returns:
        Its files; none for a worker past the last file.

    Raises:
        InvalidArgumentError: fewer files than workers, raised for the workers that have one, as in TensorFlow.
    """
    mine = list(files[worker::workers])
    if mine:
        check_files(files, workers)
    return mine


def count_steps(samples: int, batch_size: int, drop_remainder: bool, layout: Layout, policy: AutoShardPolicy) -> int:
    """Steps that a worker makes over ``samples`` examples of its stream."""
    batches, rest = divmod(samples, batch_size)
    steps = batches * len(steps_of_batch(batch_size, batch_size, layout, policy)) if batches else 0
    if rest and not drop_remainder:
        steps += len(steps_of_batch(rest, batch_size, layout, policy))
    return steps


def count_samples(samples: int, batch_size: int, drop_remainder: bool, layout: Layout, policy: AutoShardPolicy) -> int:
    """Examples that a worker keeps out of ``samples`` examples of the stream that it reads."""

    def kept(size: int) -> int:
        return sum(len(p) for step in steps_of_batch(size, batch_size, layout, policy) for p in step)

    batches, rest = divmod(samples, batch_size)
    return (batches * kept(batch_size) if batches else 0) + (kept(rest) if rest and not drop_remainder else 0)
