"""The order of an epoch, and a batch sampler that yields one worker's share of each global batch."""

from __future__ import annotations

import abc
import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.input.batch_seeds import SeededIndices
from tfstyle_dist.input.options import AutoShardPolicy
from tfstyle_dist.input.sharding import Cut, Layout, Pieces, Position, count_steps, steps_of_batch
from tfstyle_dist.runtime.random_streams import python_state, seed_python, set_python_state
from tfstyle_dist.runtime.worker import Worker

_SEEDS = 2**63
_MOST_MORE = 1_000_000  # samples that a sampler may yield beyond twice its length


def mixed_seed(seed: int, number: int) -> int:
    """A seed for the ``number``-th epoch or worker; far apart for neighbouring seeds."""
    return (seed + number * 0x9E3779B97F4A7C15) % _SEEDS


class EpochOrder(abc.ABC):
    """In which order the samples of a map-style dataset come; the same on all workers."""

    @abc.abstractmethod
    def indices(self, epoch: int) -> Sequence[Any] | torch.Tensor:
        """All indices of one epoch.

        Args:
            epoch: number of the epoch, from 0.

        Returns:
            A sequence, or an int64 tensor.
        """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Samples in an epoch."""


class SequentialOrder(EpochOrder):
    """0, 1, 2, ...

    Args:
        samples: a dataset, or a sampler of it; its length is that of an epoch that begins.
    """

    def __init__(self, samples: Sized) -> None:
        self._samples = samples

    def indices(self, epoch: int) -> Sequence[Any]:
        return range(len(self))

    def __len__(self) -> int:
        return len(self._samples)


class ShuffledOrder(EpochOrder):
    """A new permutation in each epoch, a function of the seed and the epoch alone.

    Args:
        samples: a dataset, or a sampler of it; its length is that of an epoch that begins.
        seed: the same on all workers.
    """

    def __init__(self, samples: Sized, seed: int) -> None:
        self._samples, self.seed = samples, seed

    def indices(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
        return torch.randperm(len(self), generator=generator, device="cpu")  # whatever the default device is

    def __len__(self) -> int:
        return len(self._samples)


class SampledOrder(EpochOrder):
    """What a sampler of the user's draws. Worker 0 draws it, seeded for the epoch; the others get its indices.

    Args:
        sampler: any sampler with a length.
        seed: the same on all workers; what torch, Python and numpy draw comes from it while the sampler runs.
        worker: the worker and its group.
    """

    def __init__(self, sampler: Any, seed: int, worker: Worker) -> None:
        self._sampler, self.seed, self._worker = sampler, seed, worker

    def indices(self, epoch: int) -> Sequence[Any] | torch.Tensor:
        """See ``EpochOrder``; with several workers a collective call.

        Raises:
            TypeError: several workers, and the sampler does not yield whole numbers.
        """
        group = self._worker.group
        drawn = self._draw(epoch) if group.rank == 0 else []
        if group.alone:
            return drawn
        numbers = [self._number(index) for index in drawn]
        count = torch.tensor([len(numbers)], device="cpu")
        group.broadcast(count, 0, "input: length of the epoch")
        order = torch.tensor(numbers, dtype=torch.int64, device="cpu") if numbers else count.new_empty(int(count))
        group.broadcast(order, 0, "input: order of the epoch")
        return order

    def _number(self, index: Any) -> int:
        try:
            if not isinstance(index, bool):
                return operator.index(index)  # of numpy's and torch's whole numbers too
        except TypeError:
            pass
        raise TypeError(
            f"{type(self._sampler).__name__} yields {index!r}; with several workers a sampler must yield whole "
            "numbers, because worker 0 sends its order to the others. Use whole numbers as keys of the dataset."
        )

    def _draw(self, epoch: int) -> list[Any]:
        seed = mixed_seed(self.seed, epoch)
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        most = 2 * len(self) + _MOST_MORE
        with random_numbers_of(seed), _generator_of(self._sampler, seed):
            drawn = list(itertools.islice(self._sampler, most + 1))
        if len(drawn) > most:
            raise ValueError(
                f"{type(self._sampler).__name__} has a length of {len(self)} and did not end after {most} samples. A "
                "sampler must end with its epoch, because the whole order is drawn before it is divided. Let it yield "
                "one epoch, and iterate over the distributed dataset again for the next one, or without an end: "
                "itertools.chain.from_iterable(itertools.repeat(batches))."
            )
        return drawn

    def __len__(self) -> int:
        return len(self._sampler)


@contextlib.contextmanager
def random_numbers_of(seed: int) -> Iterator[None]:
    """The global random numbers of torch, Python and numpy come from ``seed`` for a while, then go on as before."""
    before = python_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone: what the step draws on a device goes on
        seed_python(seed)
        try:
            yield
        finally:
            set_python_state(before)


@contextlib.contextmanager
def _generator_of(sampler: Any, seed: int) -> Iterator[None]:
    """Gives a sampler that has a generator one of ``seed`` for a while."""
    before = getattr(sampler, "generator", None)
    if before is None:
        yield
        return
    sampler.generator = torch.Generator(device=before.device).manual_seed(seed)
    try:
        yield
    finally:
        sampler.generator = before


class ShareSampler(Sampler[list[Any]]):
    """A batch sampler for a rebuilt DataLoader: the indices that this worker needs of each global batch.

    Steps in which the worker has no sample are not yielded; ``plan`` tells where they are.

    Args:
        order: order of the samples.
        batch_size: samples of a global batch.
        drop_remainder: whether a smaller last batch is left out.
        layout: numbers of workers and replicas.
        policy: ``DATA`` or ``OFF``.

    Attributes:
        batch_seed: what the loader's processes draw for a batch of the pass that begins comes from it; ``None``: from
            what they drew before.
    """

    batch_seed: int | None = None

    def __init__(
        self, order: EpochOrder, batch_size: int, drop_remainder: bool, layout: Layout, policy: AutoShardPolicy
    ) -> None:
        self.order, self.batch_size, self.drop_remainder = order, batch_size, drop_remainder
        self.layout, self.policy = layout, policy
        self._compared = None if isinstance(order, SampledOrder) else len(order)
        self._indices: Sequence[Any] | torch.Tensor = range(0)
        self._start: Position = (0, 0)

    def begin(self, epoch: int, position: Position = (0, 0)) -> None:
        """Chooses the epoch, and where in it the next ``iter`` begins.

        Raises:
            InvalidArgumentError: several workers, and the dataset is not as long as it was when they compared it.
        """
        if self.layout.workers > 1 and self._compared is not None and len(self.order) != self._compared:
            raise InvalidArgumentError(
                f"The dataset had {self._compared} samples when it was distributed and has {len(self.order)} now. With "
                "several workers a length must not change by itself, because it may differ between them. When it has "
                "changed on all of them alike, distribute the dataset again (strategy.experimental_distribute_dataset)."
            )
        self._indices, self._start = self.order.indices(epoch), position

    def some_index(self) -> Any:
        """The first index of the chosen epoch."""
        index = self._indices[0]
        return int(index) if isinstance(index, torch.Tensor) else index

    def leaves_out(self) -> bool:
        """Whether the smaller last batch of the chosen epoch has no sample for a replica of this worker."""
        rest = 0 if self.drop_remainder else len(self._indices) % self.batch_size
        steps = steps_of_batch(rest, self.batch_size, self.layout, self.policy) if rest else []
        return any(not all(step.pieces) for step in steps)

    def plan(self) -> Iterator[tuple[Cut, Position]]:
        """The steps of the chosen epoch.

        Yields:
            What each step takes, as places in the epoch's order, and where the next step begins.
        """
        return _plan(self._start, len(self._indices), self.batch_size, self.drop_remainder, self.layout, self.policy)

    def __iter__(self) -> Iterator[list[Any]]:
        # Not a generator itself: the plan and the order are taken now, so that a later begin() does not disturb.
        share_of, seed = self.reader(), self.batch_seed

        def seeded(pieces: Pieces) -> list[Any]:
            share = share_of(pieces)
            return share if seed is None else SeededIndices(share, seed, next(p for p in pieces if p).start)

        return (seeded(step.pieces) for step, _ in self.plan() if any(step.pieces))

    def reader(self) -> Callable[[Pieces], list[Any]]:
        """A function that takes the ranges of a step of the epoch chosen now, and gives the samples' indices."""
        indices = self._indices

        def part(piece: range) -> Sequence[Any]:
            found = indices[piece.start : piece.stop]
            return found.tolist() if isinstance(found, torch.Tensor) else found

        def share_of(pieces: Pieces) -> list[Any]:
            return list(part(pieces[0])) if len(pieces) == 1 else [index for p in pieces for index in part(p)]

        return share_of

    def __len__(self) -> int:
        start, taken = self._start
        left = max(len(self._indices) - start, 0)
        return max(count_steps(left, self.batch_size, self.drop_remainder, self.layout, self.policy) - taken, 0)


def _plan(
    position: Position, end: int, batch_size: int, drop_remainder: bool, layout: Layout, policy: AutoShardPolicy
) -> Iterator[tuple[Cut, Position]]:
    start, taken = position
    full = steps_of_batch(batch_size, batch_size, layout, policy)
    while start < end:
        size = min(batch_size, end - start)
        if size < batch_size and drop_remainder:
            return
        steps = full if size == batch_size else steps_of_batch(size, batch_size, layout, policy)
        for number, (pieces, division) in enumerate(steps[taken:], start=taken + 1):
            after = (start + size, 0) if number == len(steps) else (start, number)
            yield Cut(tuple([range(start + p.start, start + p.stop) for p in pieces]), division), after
        start, taken = start + size, 0
