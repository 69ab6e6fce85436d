"""What one worker reads, as a sequence of steps with one batch for each of its replicas."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tfstyle_dist.core import torch_internals
from tfstyle_dist.input.examples import lengths, refuse_list_of_tensors
from tfstyle_dist.input.grouping import Lists
from tfstyle_dist.input.options import AutoShardPolicy
from tfstyle_dist.input.seeds import WithSeeds
from tfstyle_dist.input.sharding import Layout, Pieces, Position, steps_of_batch
from tfstyle_dist.input.split import empty_like, first_size, is_scalar, leading_size, slice_batch
from tfstyle_dist.values import Division


@dataclass(frozen=True)
class Step:
    """One step of one worker.

    Attributes:
        parts: a batch for each local replica.
        after: where the next step begins.
        whole: the batch that the parts were cut from, for a comparison over the workers.
        sizes: examples of each part; ``None`` where they cannot be told, as without a first dimension.
        division: the shares of all replicas of all workers; ``None`` where this worker alone cannot tell.
        lists: where parts that were collated for each replica have lists with an entry for each sample.
    """

    parts: Sequence[Any]
    after: Position
    whole: Any = None
    sizes: Sequence[int] | None = None
    division: Division | None = None
    lists: Lists | None = None


class Pipeline(abc.ABC):
    """One worker's input.

    Attributes:
        layout: numbers of workers and replicas.
        unit: what a saved position counts: ``"samples"``, ``"batches"``, or ``"steps"`` of this very layout.
        same_on_all: whether all workers make the same number of steps, which each knows without asking.
        compares: whether all workers must read the same batches.
        pass_seed: what a loader's processes draw in a pass that others may enter comes from it; ``None`` before one
            begins, which draws it.
    """

    layout: Layout
    unit: str = "batches"
    same_on_all: bool = False
    compares: bool = False
    pass_seed: int | None = None

    @abc.abstractmethod
    def begin(self, epoch: int, position: Position) -> Iterator[Step]:
        """Starts an epoch, or goes on within one.

        Args:
            epoch: its number, from 0.
            position: where to begin.

        Returns:
            The steps.
        """

    @abc.abstractmethod
    def steps_per_epoch(self) -> int | None:
        """Steps of a whole epoch on this worker; ``None`` when it is not known without reading."""

    def num_batches(self) -> int | None:
        """Batches of the dataset that was given; ``None`` when it is not known without reading."""
        return self.steps_per_epoch()

    def facts(self) -> dict[str, Any]:
        """What must be the same on all workers and in a saved position."""
        return {}

    def seed(self) -> int | None:
        """The seed of the shuffled order, if there is one."""
        return None

    def set_seed(self, seed: int) -> None:
        """Takes a saved seed back."""
        return


def cut(batch: Any, pieces: Pieces) -> list[Any]:
    """The parts of ``batch`` at ``pieces``."""
    return [slice_batch(batch, piece) for piece in pieces]


class BatchPipeline(Pipeline):
    """Reads whole batches and keeps this worker's pieces of each.

    Args:
        source: called with the epoch for an iterable of batches.
        layout: numbers of workers and replicas.
        policy: ``DATA`` when all workers read the same batches, else they read their own or keep all.
        length: batches of an epoch, when that is certain.
        batch_size: examples of a full batch; default: those of the first one.
        samples: of a full batch; ``None`` where that is not known, or where lists are known to hold fields.
        said: asks for the length of the next epoch where it is not certain.
    """

    def __init__(
        self,
        source: Callable[[int], Iterable[Any]],
        layout: Layout,
        policy: AutoShardPolicy,
        length: int | None = None,
        batch_size: int | None = None,
        samples: int | None = None,
        said: Callable[[], int | None] | None = None,
    ) -> None:
        self._said = said
        self._batch_size, self._samples = batch_size or 0, samples or 0
        self._source, self.layout, self._policy, self._length = source, layout, policy, length
        own_stream = policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT)
        self.unit = "steps" if own_stream else "batches"
        shared = policy is AutoShardPolicy.DATA
        self.same_on_all = shared and length is not None
        self.compares = shared and not self.same_on_all

    def steps_per_epoch(self) -> int | None:
        """See ``Pipeline``; known where a batch is a step."""
        single = self.layout.workers == 1 or self._policy is AutoShardPolicy.DATA
        if single and self._said is not None:
            return self._said()
        return self._length if single else None

    def facts(self) -> dict[str, Any]:
        return {"policy": self._policy.name} | ({"batches": self._length} if self.same_on_all else {})

    def begin(self, epoch: int, position: Position) -> Iterator[Step]:
        """See ``Pipeline``: batches before ``position`` are read and dropped."""
        source = self._source(epoch)
        if isinstance(source, WithSeeds):
            source.pass_seed = self.pass_seed
        steps = self._steps(iter(source), (0, 0) if self.unit == "steps" else position)
        if isinstance(source, WithSeeds) and self.layout.workers == 1:  # else each worker has one of its own
            self.pass_seed = source.pass_seed
        if self.unit == "steps":
            for _ in range(position[0]):
                next(steps, None)
        return steps

    def _steps(self, batches: Iterator[Any], position: Position) -> Iterator[Step]:
        with stopping(batches):
            if self.layout.all_replicas == 1:
                yield from (Step([b], (i + 1, 0)) for i, b in enumerate(batches) if i >= position[0])
            else:
                yield from self._cut_steps(batches, position)

    def _cut_steps(self, batches: Iterator[Any], position: Position) -> Iterator[Step]:
        full, made = self._batch_size, 0
        sizes: list[int] | None = None  # of the first batch's lists, if they hold fields
        for number, batch in enumerate(batches):
            if self._samples and (now := lengths(batch)) != sizes:
                sizes = now if sizes is None else sizes
                refuse_list_of_tensors(batch, self._samples, self.layout.all_replicas)
            size = leading_size(batch)
            full = max(full, size)
            if number < position[0]:
                continue
            steps = steps_of_batch(size, full, self.layout, self._policy)
            for index, (pieces, division) in enumerate(steps, start=1):
                if number == position[0] and index <= position[1]:
                    continue
                made += 1
                after = (number + 1, 0) if index == len(steps) else (number, index)
                sizes = [len(piece) for piece in pieces]
                yield Step(cut(batch, pieces), (made, 0) if self.unit == "steps" else after, batch, sizes, division)


class DealtPipeline(Pipeline):
    """Deals out the batches of a ``dataset_fn`` as they are: the r-th of every L consecutive ones to replica r.

    Args:
        sources: one iterable for the worker, or one for each of its replicas.
        layout: numbers of workers and replicas.
        lengths: the number of elements of each source, where known.
    """

    unit = "steps"

    def __init__(self, sources: Sequence[Iterable[Any]], layout: Layout, lengths: Sequence[int | None]) -> None:
        self._sources, self.layout, self._lengths = sources, layout, lengths

    def steps_per_epoch(self) -> int | None:
        known = [n for n in self._lengths if n is not None]
        if len(known) < len(self._lengths):
            return None
        return max(known) if len(known) > 1 else -(-known[0] // self.layout.replicas)

    def num_batches(self) -> int | None:
        """See ``Pipeline``: a batch is for one replica."""
        return self._lengths[0]

    def begin(self, epoch: int, position: Position) -> Iterator[Step]:
        """See ``Pipeline``: elements before ``position`` are read and dropped."""
        for source in self._sources:
            tell_epoch(source, epoch)
        replicas = self.layout.replicas
        streams = [iter(s) for s in self._sources]
        if len(streams) < replicas:
            streams *= replicas
        steps = self._steps(streams)
        for _ in range(position[0]):
            next(steps, None)
        return steps

    def _steps(self, streams: Sequence[Iterator[Any]]) -> Iterator[Step]:
        made, nothing = 0, object()
        while True:
            with stopping(*streams):
                elements = [next(stream, nothing) for stream in streams]
            got = [e for e in elements if e is not nothing]
            if not got or (len(got) < len(elements) and is_scalar(got[0])):
                return
            missing = _left_over(got[0], len(elements) - len(got)) if len(got) < len(elements) else None
            made += 1
            parts = [missing if e is nothing else e for e in elements]
            yield Step(parts, (made, 0), **self._shares(parts))

    def _shares(self, parts: Sequence[Any]) -> dict[str, Any]:
        if self.layout.all_replicas == 1:
            return {}
        sizes = [size for part in parts if (size := first_size(part)) is not None]
        if len(sizes) < len(parts):
            return {}
        return {"sizes": sizes, "division": Division.of(sizes) if self.layout.workers == 1 else None}


def _left_over(batch: Any, without: int) -> Any:
    """An empty batch for the replicas that have none of the last batches of a ``dataset_fn``."""
    try:
        return empty_like(batch)
    except (IndexError, TypeError, ValueError) as error:
        error.add_note(
            f"The batches of dataset_fn are no multiple of the replicas: {without} of them would get an empty batch, "
            "and none can be made of the last one. Give each replica as many batches, or leave the last ones out."
        )
        raise


@contextlib.contextmanager
def stopping(*streams: Any) -> Iterator[None]:
    """Ends the processes of DataLoader iterators when reading them fails.

    The error's traceback keeps such an iterator alive, and as long as it lives torch's handler raises again and
    again for a process that was killed.
    """
    try:
        yield
    except GeneratorExit:  # left early: nothing failed
        raise
    except BaseException as error:
        dead = [pid for stream in streams for pid in _killed(stream, error)]
        for stream in streams:
            torch_internals.end_reader_processes(stream)
        if dead:
            raise RuntimeError(
                f"DataLoader worker (pid {', '.join(map(str, dead))}) was killed while it was read. Look for the "
                "kernel's out-of-memory killer, and at what the dataset does in its processes; num_workers=0 shows the "
                "latter."
            ) from error
        raise


def _killed(stream: Any, error: BaseException) -> list[int]:
    """The processes behind a broken connection; torch reports the connection, not the process."""
    if not isinstance(error, ConnectionError | EOFError):
        return []
    dead = []
    for process in torch_internals.reader_processes(stream):
        process.join(0.5)
        if process.exitcode is not None and process.exitcode != 0:
            dead.append(process.pid)
    return dead


def tell_epoch(source: Any, epoch: int) -> None:
    """Calls ``set_epoch`` of whatever has one: the source, its dataset, its samplers."""
    for holder in (source, *(getattr(source, name, None) for name in ("dataset", "batch_sampler", "sampler"))):
        inner = getattr(holder, "sampler", None)
        for thing in (holder, inner):
            if callable(getattr(thing, "set_epoch", None)):
                thing.set_epoch(epoch)  # type: ignore[union-attr]
