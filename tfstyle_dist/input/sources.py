"""From what the user has (DataLoader, Dataset, iterable) to this worker's pipeline; what is refused, and why."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from tfstyle_dist.input.checks import (
    batches_of,
    check_batch_size,
    own_reading,
    refuse,
    refuse_indices,
    refuse_scalars,
    refuse_sharded,
)
from tfstyle_dist.input.files import ListsFiles
from tfstyle_dist.input.loader import SamplerPipeline
from tfstyle_dist.input.options import AutoShardPolicy, check_policy
from tfstyle_dist.input.pipeline import BatchPipeline, tell_epoch
from tfstyle_dist.input.request import Plan, Request
from tfstyle_dist.input.sampler import EpochOrder, SampledOrder, SequentialOrder, ShuffledOrder
from tfstyle_dist.input.seeds import LoaderSeeds, WithSeeds, may_be_entered
from tfstyle_dist.input.sharding import check_files, resolve_policy, shard_files

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def make_plan(dataset: Any, request: Request) -> Plan:
    """The pipeline for a dataset.

    Args:
        dataset: a DataLoader, map-style Dataset, IterableDataset, or iterable of global batches.
        request: the options.

    Raises:
        TypeError: not a dataset.
        ValueError: an unbatched dataset, a sampler that already shards, or options that do not fit.
        NotFoundError: ``FILE`` or ``HINT`` with a dataset that cannot do that.
        InvalidArgumentError: fewer files than workers, or a batch too small to be full on every replica.
    """
    if isinstance(dataset, DataLoader):
        return _plan_loader(dataset, request)
    refuse(dataset)
    if request.batch_size is not None:
        return _plan_samples(dataset, request)
    if request.shuffle or request.drop_remainder or request.loader_options:
        raise ValueError(
            "shuffle, drop_remainder and the options of a DataLoader need global_batch_size=: without it the dataset's "
            "own batches are taken as they come."
        )
    if isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset):
        raise ValueError(
            f"{type(dataset).__name__} is not batched: pass global_batch_size= (examples of all replicas together), or "
            "a DataLoader whose batch_size is the global batch size."
        )
    return _plan_stream(dataset, request, "the whole stream of batches")


def _plan_loader(loader: DataLoader[Any], request: Request) -> Plan:
    """A DataLoader of global batches: rebuilt over this worker's share where that is possible."""
    if request.batch_size is not None or request.shuffle or request.drop_remainder or request.loader_options:
        raise ValueError(
            f"A DataLoader has its own batch_size ({loader.batch_size}), sampler and options; set them there "
            "(batch_size is the global batch size), or pass its dataset with global_batch_size=."
        )
    refuse_sharded(loader)
    policy = resolve_policy(_asked(loader.dataset, request), request.layout.workers, *_abilities(loader.dataset))
    refuse_indices(loader.dataset, policy, request.layout.workers)
    why = _not_rebuilt(loader)
    own_stream = request.layout.workers > 1 and policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT)
    if own_stream or why:
        return _plan_stream(loader, request, f"every batch of the DataLoader ({why})" if why else "its own DataLoader")
    size = int(loader.batch_sampler.batch_size)  # type: ignore[union-attr]
    drop = bool(loader.batch_sampler.drop_last)  # type: ignore[union-attr]
    size = check_batch_size(size, drop, request.layout)
    order = _order_of(loader, request)
    return _sampler_plan(loader.dataset, order, size, drop, policy, _options_of(loader), request)


def _options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """What another DataLoader is made with in its place."""
    options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if not options["num_workers"]:
        options["prefetch_factor"] = None
    return options


def _not_rebuilt(loader: DataLoader[Any]) -> str:
    """Why a DataLoader must be read as it is; empty when it can be rebuilt with another batch sampler."""
    if own := own_reading(type(loader)):
        return f"{type(loader).__name__} has a method {own} of its own"
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset has no indices"
    if loader.batch_sampler is None:
        return "batch_size=None: the dataset makes its own batches"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"its batch sampler is a {type(loader.batch_sampler).__name__}"
    return ""


def _order_of(loader: DataLoader[Any], request: Request) -> EpochOrder:
    sampler: Any = loader.batch_sampler.sampler  # type: ignore[union-attr]
    if type(sampler) is SequentialSampler:
        return SequentialOrder(sampler)
    generator = getattr(sampler, "generator", None) or loader.generator
    seed = _agreed_seed(request, generator)
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return ShuffledOrder(sampler, seed)
    if not hasattr(sampler, "__len__"):
        raise TypeError(
            f"{type(sampler).__name__} has no length, so its samples cannot be divided among the replicas. Give it a "
            "__len__, or pass an iterable of global batches."
        )
    return SampledOrder(sampler, seed, request.worker)


def _agreed_seed(request: Request, generator: torch.Generator | None) -> int:
    """One seed for all workers: the one given, a generator's, or the one that worker 0 draws from torch's numbers."""
    seed = request.seed
    if seed is None:
        seed = request.worker.draw_seed() if generator is None else generator.initial_seed()
    if request.layout.workers == 1 and request.worker.group.alone:
        return seed
    return int(request.worker.group.gather_objects(seed, "input: seed")[0])


def _plan_samples(dataset: Any, request: Request) -> Plan:
    """Samples and a global batch size."""
    size = check_batch_size(request.batch_size, request.drop_remainder, request.layout)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if request.shuffle:
            raise ValueError(
                "shuffle=True needs a dataset with indices and a length; shuffle inside the IterableDataset."
            )
        if not isinstance(dataset, IterableDataset):
            raise TypeError(
                f"global_batch_size= needs samples: a Dataset with __getitem__ and __len__, or an IterableDataset; "
                f"{type(dataset).__name__} is neither."
            )
        loader = DataLoader(dataset, batch_size=size, drop_last=request.drop_remainder, **request.loader_options)
        return _plan_stream(loader, request, "every sample of the IterableDataset")
    try:
        len(dataset)
    except (TypeError, NotImplementedError):
        raise TypeError(
            f"{type(dataset).__name__} has no length (__len__), which is needed to divide its samples among the "
            "replicas. Add one, or make it an IterableDataset."
        ) from None
    policy = resolve_policy(_asked(dataset, request), request.layout.workers, *_abilities(dataset))
    refuse_indices(dataset, policy, request.layout.workers)
    order: EpochOrder = SequentialOrder(dataset)
    if request.shuffle:
        order = ShuffledOrder(dataset, _agreed_seed(request, request.loader_options.get("generator")))
    return _sampler_plan(dataset, order, size, request.drop_remainder, policy, request.loader_options, request)


def _sampler_plan(
    dataset: Any,
    order: EpochOrder,
    size: int,
    drop: bool,
    policy: AutoShardPolicy,
    options: dict[str, Any],
    request: Request,
) -> Plan:
    pipeline = SamplerPipeline(dataset, order, size, drop, request.layout, policy, options)
    pipeline.seeds_batches = may_be_entered(request.worker, options.get("num_workers", 0))
    reads = "reads them all" if policy is AutoShardPolicy.OFF else "reads these only"
    notes = []
    if drop and len(order) < size:
        notes.append(
            f"{len(order)} samples are less than one batch of {size}: with drop_remainder there is no step at all"
        )
    return Plan(pipeline, policy, size, len(order), reads, notes=notes)


def _asked(dataset: Any, request: Request) -> AutoShardPolicy:
    """The policy of the call, or the dataset's own attribute ``auto_shard_policy``."""
    if request.policy is not AutoShardPolicy.AUTO:
        return request.policy
    own = getattr(dataset, "auto_shard_policy", AutoShardPolicy.AUTO)
    if own in [policy.value for policy in AutoShardPolicy]:  # its number
        return AutoShardPolicy(own)
    return check_policy(own, f"The attribute auto_shard_policy of {type(dataset).__name__}")


def _abilities(dataset: Any) -> tuple[bool, bool]:
    return lists_files(dataset), callable(getattr(dataset, "shard", None))


def lists_files(dataset: Any) -> bool:
    """Whether a dataset lists its files; a dataset may have the attribute and set it to ``None``."""
    return isinstance(dataset, ListsFiles) and dataset.files is not None


def _plan_stream(source: Any, request: Request, reads: str) -> Plan:
    """An iterable of batches: a DataLoader that is read as it is, a list, or any other."""
    refuse_scalars(source)
    layout = request.layout
    loader = source if isinstance(source, DataLoader) else None
    dataset: Any = source if loader is None else loader.dataset
    policy = resolve_policy(_asked(dataset, request), layout.workers, *_abilities(dataset))
    files: list[list[str]] = []
    own = policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT) and layout.workers > 1
    if own and policy is AutoShardPolicy.FILE:
        check_files(dataset.files, layout.workers)
        files = [[str(f) for f in shard_files(dataset.files, layout.workers, w)] for w in range(layout.workers)]
        dataset = dataset.with_files(shard_files(dataset.files, layout.workers, layout.worker))
        reads = "reads its own files"
    elif own:
        dataset = dataset.shard(layout.workers, layout.worker)
        reads = "reads its own shard"
    seeds = None
    if own and loader is not None and policy is AutoShardPolicy.FILE:  # a shard may need equal random numbers
        seeds = LoaderSeeds(loader.generator, layout.worker)
    if own:
        source = dataset if loader is None else _with_dataset(loader, dataset, seeds)
    elif loader is not None and may_be_entered(request.worker, loader.num_workers):
        seeds = LoaderSeeds(loader.generator, layout.worker)
        loader.generator = seeds.generator
    notes = []
    if layout.workers > 1 and policy is AutoShardPolicy.DATA:
        notes.append(
            f"every worker reads {reads} and keeps its own piece of each batch; all workers must read the same "
            "batches. A map-style Dataset with global_batch_size=, or a plain DataLoader over one, reads each sample "
            "once"
        )
        reads = "reads everything, keeps its pieces"
    elif layout.workers > 1 and policy is AutoShardPolicy.OFF:
        reads = "reads and keeps everything"
    length = len(source) if isinstance(source, list) else None
    size = getattr(source, "batch_size", None)
    size = size if isinstance(size, int) else None
    fields = getattr(source, "collate_fn", None) is default_collate  # in its lists
    samples = None if fields else size or _samples_of(getattr(source, "batch_sampler", None))
    said = None if loader is None else partial(batches_of, loader)
    pipeline = BatchPipeline(_Epochs(source, seeds), layout, policy, length, size, samples, said)
    return Plan(pipeline, policy, size, None, reads, files, notes)


def _samples_of(batch_sampler: Any) -> int | None:
    """The samples of a full batch of a user's own batch sampler, where it says so."""
    if isinstance(batch_sampler, list | tuple):
        return max((len(batch) for batch in batch_sampler if isinstance(batch, list | tuple)), default=None)
    size = getattr(batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


class _Epochs:
    """Reads a source once for each epoch, and tells it the epoch where it wants to know."""

    def __init__(self, source: Any, seeds: LoaderSeeds | None) -> None:
        self._source, self._seeds = source, seeds

    def __call__(self, epoch: int) -> Iterable[Any]:
        tell_epoch(self._source, epoch)
        return self._source if self._seeds is None else WithSeeds(self._source, self._seeds)


def _with_dataset(loader: DataLoader[Any], dataset: Any, seeds: LoaderSeeds | None) -> DataLoader[Any]:
    """The same DataLoader over another IterableDataset, perhaps with other seeds."""
    options = _options_of(loader)
    if seeds is not None:
        options["generator"] = seeds.generator
    return DataLoader(dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **options)
