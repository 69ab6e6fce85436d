"""Which examples of a batch, and which files, each worker and replica gets.

Pure functions of the policy and of the numbers of workers and replicas. Which worker reads what is decided by
``sources.make_plan``, the order of the samples by ``sampler``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tfstyle_dist.core.errors import InvalidArgumentError, NotFoundError
from tfstyle_dist.input.options import AutoShardPolicy
from tfstyle_dist.values import Division, cut_evenly

T = TypeVar("T")
Pieces = tuple[range, ...]
"""The examples of one global batch for one step of one worker: a range for each of its replicas."""
Position = tuple[int, int]
"""Where a step begins: units (samples, batches or steps) that were used up, and steps taken of the batch after them."""


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


class Cut(NamedTuple):
    """What one worker takes out of a batch in one step.

    Attributes:
        pieces: the examples of each of its replicas.
        division: the shares of all replicas of all workers; ``None`` where this worker alone cannot tell.
    """

    pieces: Pieces
    division: Division | None


def chunks(size: int, replicas: int) -> list[range]:
    """Cuts a batch into consecutive pieces of equal size, as TensorFlow does where all workers read the same batches.

    Args:
        size: examples in the batch.
        replicas: number of pieces.

    Returns:
        ``replicas`` ranges; the last ones may be shorter or empty.

    Example:
        >>> [len(c) for c in chunks(5, 4)]
        [2, 2, 1, 0]
    """
    step = -(-size // replicas)
    return [range(min(i * step, size), min((i + 1) * step, size)) for i in range(replicas)]


def own_pieces(size: int, full_size: int, layout: Layout) -> list[range]:
    """Cuts a batch of a stream that one worker reads alone, as ``tf.data`` rebatches it (``batch_sizes_for_worker``).

    The pieces of a full batch differ by one example at most. Those of worker 0 begin with the larger ones, and each
    worker begins where the replicas of the one before it end; so what all replicas get in one step is a full batch.

    Args:
        size: examples in the batch.
        full_size: those of a full batch; a smaller last batch is cut into pieces of the full batch's sizes.
        layout: numbers of workers and replicas.

    Returns:
        A range for each replica of all workers; the last ones may be shorter or empty.

    Example:
        >>> [len(c) for c in own_pieces(7, 7, Layout(workers=2, worker=0, replicas=2))]
        [2, 2, 2, 1]
        >>> [len(c) for c in own_pieces(7, 7, Layout(workers=2, worker=1, replicas=2))]
        [2, 1, 2, 2]
        >>> [len(c) for c in own_pieces(3, 7, Layout(replicas=3))]
        [3, 0, 0]
    """
    pieces, first = layout.all_replicas, layout.worker * layout.replicas
    small, larger = divmod(max(size, full_size), pieces)
    sizes = [small + ((first + i) % pieces < larger) for i in range(pieces)]
    return [range(min(a, size), min(b, size)) for a, b in itertools.pairwise(itertools.accumulate(sizes, initial=0))]


def steps_of_batch(size: int, full_size: int, layout: Layout, policy: AutoShardPolicy) -> list[Cut]:
    """What one worker takes out of one batch of the stream that it reads.

    Under ``DATA`` (and with one worker) a batch is one step. Its pieces go to the workers in turn: piece k to worker
    k mod W. Under the other policies a worker keeps all pieces of its own stream, L in each step. A last batch that is
    smaller has no step in which nobody who reads it has an example: this worker, or under ``OFF`` all of them.

    Args:
        size: examples in the batch.
        full_size: size of a full batch.
        layout: numbers of workers and replicas.
        policy: ``OFF``, ``FILE``, ``DATA`` or ``HINT``; see ``resolve_policy``.

    Returns:
        The steps.
    """
    if policy is AutoShardPolicy.DATA:
        pieces = chunks(size, layout.all_replicas)
        return [Cut(tuple(pieces[layout.worker :: layout.workers]), cut_evenly(size, layout.all_replicas))]
    off = policy is AutoShardPolicy.OFF
    readers = [layout.of_worker(worker) for worker in range(layout.workers)] if off else [layout]
    steps = list(zip(*(_in_steps(own_pieces(size, full_size, reader), layout) for reader in readers), strict=True))
    while size < full_size and len(steps) > 1 and not any(any(pieces) for pieces in steps[-1]):
        steps.pop()
    told = off or layout.workers == 1
    return [
        Cut(each[layout.worker if off else 0], Division.of([len(p) for part in each for p in part]) if told else None)
        for each in steps
    ]


def _in_steps(pieces: Sequence[range], layout: Layout) -> list[Pieces]:
    return [tuple(pieces[i : i + layout.replicas]) for i in range(0, len(pieces), layout.replicas)]


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
        return sum(len(p) for step in steps_of_batch(size, batch_size, layout, policy) for p in step.pieces)

    batches, rest = divmod(samples, batch_size)
    return (batches * kept(batch_size) if batches else 0) + (kept(rest) if rest and not drop_remainder else 0)
