"""A map-style dataset read by sampler-level sharding: each worker loads its own share only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from tfstyle_dist.input.examples import empty_of, lengths, list_error, say_not_counted
from tfstyle_dist.input.inline import InlineCollate
from tfstyle_dist.input.options import AutoShardPolicy
from tfstyle_dist.input.pieces import PieceCollate, ShareOf, gives_samples
from tfstyle_dist.input.pipeline import Pipeline, Step, cut, stopping
from tfstyle_dist.input.sampler import EpochOrder, ShareSampler, ShuffledOrder, random_numbers_of
from tfstyle_dist.input.seeds import LoaderSeeds, on_the_cpu
from tfstyle_dist.input.sharding import Cut, Layout, Pieces, Position, count_steps
from tfstyle_dist.input.split import first_size, fresh, leading_size

_DONE = object()


class TensorRows:
    """A ``TensorDataset`` that fetches a whole share with one index operation instead of sample by sample.

    Args:
        dataset: whose tensors are read; they may be others in the next epoch.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(t[index] for t in self._dataset.tensors)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        """The share as ``default_collate`` gives it: a list with one tensor for each field."""
        rows = torch.tensor(indices, device="cpu")
        rows = rows.where(rows >= 0, rows + len(self))  # as an index of a tensor counts from the end
        return [t.index_select(0, rows.to(t.device)) for t in self._dataset.tensors]


def as_it_is(batch: Any) -> Any:
    """The collate function of ``TensorRows``."""
    return batch


def faster(dataset: Any, collate: Callable[[list[Any]], Any]) -> tuple[Any, Callable[[list[Any]], Any]]:
    """``TensorRows`` in place of a plain ``TensorDataset`` with torch's own collate; anything else as it is."""
    if type(dataset) is TensorDataset and collate is default_collate and len(dataset.tensors) > 0:
        return TensorRows(dataset), as_it_is
    return dataset, collate


class SamplerPipeline(Pipeline):
    """Loads this worker's share of each global batch, by a DataLoader with a ``ShareSampler``.

    Args:
        dataset: a map-style dataset.
        order: order of its samples.
        batch_size: samples of a global batch.
        drop_remainder: whether a smaller last batch is left out.
        layout: numbers of workers and replicas.
        policy: ``DATA`` or ``OFF``; with one worker any.
        loader_options: further arguments of ``DataLoader``.
    """

    unit, same_on_all = "samples", True
    seeds_batches = False  # the processes draw by batch: other workers may go on in the middle of a pass

    def __init__(
        self,
        dataset: Any,
        order: EpochOrder,
        batch_size: int,
        drop_remainder: bool,
        layout: Layout,
        policy: AutoShardPolicy,
        loader_options: dict[str, Any],
    ) -> None:
        self.layout, self._policy = layout, policy
        self._options = dict(loader_options)
        self._options.pop("in_order", None)  # the steps and the saved positions follow the order of the epoch
        collate = self._options.pop("collate_fn", None) or default_collate
        self._dataset, self._collate = faster(dataset, collate)
        self.sampler = ShareSampler(order, batch_size, drop_remainder, layout, policy)
        self.by_pieces: PieceCollate | None = None
        if layout.replicas > 1 and not self._is_plain and gives_samples(dataset):
            self.by_pieces = PieceCollate(self._collate, ShareOf(batch_size, layout, policy))
        self._loader: tuple[DataLoader[Any], LoaderSeeds | None] | None = None
        self._reader: weakref.ref[_Reader] | None = None
        self._generator: torch.Generator | None = None  # none of the program's
        self._drawn = 0  # its numbers, one for each pass
        self._template: Any = None
        self._checked = False
        self._lists: bool | None = None

    def steps_per_epoch(self) -> int:
        s = self.sampler
        return count_steps(len(s.order), s.batch_size, s.drop_remainder, self.layout, self._policy)

    def facts(self) -> dict[str, Any]:
        s = self.sampler
        return {"policy": self._policy.name, "samples": len(s.order), "global batch": s.batch_size}

    def seed(self) -> int | None:
        return getattr(self.sampler.order, "seed", None)

    def set_seed(self, seed: int) -> None:
        if hasattr(self.sampler.order, "seed"):
            if self.sampler.order.seed != seed:
                self._loader = None  # its processes' seeds come from it
            self.sampler.order.seed = seed

    def begin(self, epoch: int, position: Position) -> Iterator[Step]:
        """See ``Pipeline``: the order is entered at ``position``; nothing before it is read."""
        self.sampler.begin(epoch, position)
        loader, seeds = self._idle_loader()
        self._catch_up(epoch)
        with on_the_cpu(), nullcontext() if position == (0, 0) else torch.random.fork_rng(devices=[]):
            # A pass that goes on drew its number when it began.
            if seeds is not None:
                drawn = seeds.begin_epoch(self.pass_seed)
                self.pass_seed = self.sampler.batch_seed = drawn if self.seeds_batches else None
            batches: Iterator[Any] | None = iter(loader)  # made in any case: it draws a random number from torch
        if loader.num_workers == 0 and not loader.pin_memory:
            batches = None  # what it would read in this process is read without its cost for each batch
        reader = _Reader(self, self.sampler.plan(), batches)
        if self._loader is not None and loader is self._loader[0]:
            self._reader = weakref.ref(reader)
        return reader

    def _catch_up(self, epoch: int) -> None:
        """The seeds of the loader's processes are those of this epoch, also if the ones before were read elsewhere."""
        for _ in range(self._drawn, epoch if self._generator is not None else 0):
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self._generator)
        self._drawn = max(self._drawn, epoch) + 1

    def read(self, share: list[Any], collate: Callable[[list[Any]], Any] | None = None) -> Any:
        """The batch of the samples at ``share``, read by this process; ``collate`` other than the user's makes it."""
        return (collate or self._collate)((getattr(self._dataset, "__getitems__", None) or self._fetch)(share))

    def _fetch(self, indices: list[Any]) -> list[Any]:
        dataset = self._dataset
        return [dataset[index] for index in indices]

    def _idle_loader(self) -> tuple[DataLoader[Any], LoaderSeeds | None]:
        """The loader; another one while its persistent processes serve an iterator that is not finished."""
        if self._loader is None:
            self._loader = self._new_loader()
        reader = self._reader() if self._reader is not None else None
        if self._loader[0].persistent_workers and reader is not None and not reader.finished:
            return self._new_loader()
        return self._loader

    def forget_loader(self) -> None:
        """The next epoch gets new processes: these have failed."""
        self._loader = None

    def _new_loader(self) -> tuple[DataLoader[Any], LoaderSeeds | None]:
        options = dict(self._options)
        generator = options.pop("generator", None)
        if generator is None and isinstance(self.sampler.order, ShuffledOrder):
            generator = self._generator = torch.Generator().manual_seed(self.sampler.order.seed)
            self._drawn = 0
        seeded = self.seeds_batches or self.layout.workers > 1
        seeds = LoaderSeeds(generator, self.layout.worker) if seeded else None
        collate = self.by_pieces or self._collate
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=self.sampler,
            collate_fn=InlineCollate(collate) if options.get("num_workers") else collate,
            generator=generator if seeds is None else seeds.generator,
            **options,
        )
        return loader, seeds

    def empty(self) -> Any:
        """An empty batch, made from the first sample of the dataset the first time it is needed."""
        if self.by_pieces is not None and self.by_pieces.empty is not None:
            return self.by_pieces.empty
        if self._template is None:
            self._template = fresh(empty_of(self._some, self._is_plain))
        return self._template

    @property
    def _is_plain(self) -> bool:
        return self._collate in (default_collate, as_it_is)

    def _some(self, count: int) -> Any:
        """A batch of the first sample, so many times; the program's random numbers go on as if it were not read."""
        with random_numbers_of(0):
            return self.read([self.sampler.some_index()] * count)

    def check(self, batch: Any, size: int, replicas: int) -> None:
        """Looks at a batch that the user's own collate function made.

        Args:
            batch: of one worker.
            size: its samples.
            replicas: among which it is cut.

        Raises:
            IndexError, TypeError, ValueError: it cannot be divided, or a later step would need an empty one like it.
        """
        if self._is_plain or self.layout.all_replicas == 1:
            return
        if replicas > 1:
            if self._holds_lists(batch, size):
                raise list_error(size, replicas)
            return
        found = first_size(batch)
        if found is not None and found % size and not self._holds_lists(batch, size):
            say_not_counted(found, size)
        if not self._checked and self.sampler.leaves_out():
            self.empty()  # if there is none, that is said now
        self._checked = True

    def _holds_lists(self, batch: Any, size: int) -> bool:
        """Whether a list of the batch has an entry for each sample; a batch of one sample tells it from fields."""
        if size == 1 or size not in lengths(batch):
            return False
        if self._lists is None:
            try:
                self._lists = lengths(batch) != lengths(self._some(1))
            except (
                Exception
            ):  # a collate function that wants more than one sample: lists hold fields, as they mostly do
                self._lists = False
        return self._lists


class _Reader:
    """The steps of one epoch."""

    def __init__(
        self, pipeline: SamplerPipeline, plan: Iterator[tuple[Cut, Position]], batches: Iterator[Any] | None
    ) -> None:
        self._pipeline, self._plan, self._batches = pipeline, plan, batches
        self._share_of = pipeline.sampler.reader()
        self.finished = False

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        entry = next(self._plan, None)
        if entry is None:
            self.finished = True
            if self._batches is not None:
                next(self._batches, None)  # lets the DataLoader see its end and stop its processes
                self._batches = iter(())
            raise StopIteration
        (pieces, division), after = entry
        by_pieces, parts = self._pipeline.by_pieces, self._parts(pieces)
        lists = None if by_pieces is None else by_pieces.lists
        return Step(parts, after, None, [len(piece) for piece in pieces], division, lists)

    def _parts(self, pieces: Pieces) -> list[Any]:
        size = len(pieces[0]) if len(pieces) == 1 else sum(len(p) for p in pieces)
        if size == 0:
            return [fresh(self._pipeline.empty()) for _ in pieces]
        batch = self._read(pieces) if self._batches is None else self._loaded(self._batches)
        by_pieces = self._pipeline.by_pieces
        if by_pieces is not None and by_pieces.samples_of(batch) is not None:
            return by_pieces.parts_of(batch, [len(piece) for piece in pieces], self._pipeline.sampler.leaves_out)
        self._pipeline.check(batch, size, len(pieces))
        if len(pieces) == 1:
            return [batch]
        found = leading_size(batch)
        if found != size:
            raise ValueError(
                f"collate_fn returned {found} examples for {size} samples, so the batch cannot be split over "
                f"{len(pieces)} replicas. Return one example for each sample, or start one process for each replica."
            )
        if by_pieces is not None and size > 1:
            by_pieces.whole = True
        # The share is contiguous in memory, also where its pieces are not neighbours in the global batch.
        ends = [sum(len(p) for p in pieces[: i + 1]) for i in range(len(pieces))]
        return cut(batch, tuple(range(end - len(p), end) for p, end in zip(pieces, ends, strict=True)))

    def _read(self, pieces: Pieces) -> Any:
        return self._pipeline.read(self._share_of(pieces), self._pipeline.by_pieces)

    def _loaded(self, batches: Iterator[Any]) -> Any:
        try:
            with stopping(batches):
                batch = next(batches, _DONE)
        except BaseException:
            self._pipeline.forget_loader()
            raise
        if batch is _DONE:
            raise RuntimeError("The DataLoader ended before the samples did. Its batch sampler must not be changed.")
        return batch
