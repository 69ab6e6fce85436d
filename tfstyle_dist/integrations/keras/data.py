"""What ``fit`` is given, divided among the replicas: each iteration yields one global batch as the strategy cuts it."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.input.dataset import DistributedDataset
from tfstyle_dist.input.loader import SamplerPipeline
from tfstyle_dist.input.options import AutoShardPolicy, InputOptions
from tfstyle_dist.input.request import Plan, Request
from tfstyle_dist.input.sampler import EpochOrder
from tfstyle_dist.integrations.keras.backend import ArrayDataAdapter, DataAdapter, TorchDataLoaderAdapter
from tfstyle_dist.integrations.keras.batches import Batches
from tfstyle_dist.integrations.keras.steps import usable
from tfstyle_dist.runtime.random_streams import seed_python
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.values import select_replica


class DistributedInput(DataAdapter):  # type: ignore[misc]
    """Keras' adapter for some data, read by share.

    Arrays are read by index: each worker slices the rows of its replicas only. A ``DataLoader`` is distributed by the
    strategy. Of anything else (``PyDataset``, generators) every worker reads all and keeps its rows.

    Args:
        strategy: whose replicas.
        inner: the adapter that Keras would use on one device.
        builds: the first pass serves to build the model: it yields a plain batch.
    """

    def __init__(self, strategy: Strategy, inner: Any, builds: bool) -> None:
        self._strategy, self._inner, self._builds = strategy, inner, builds
        self._dataset: Iterable[Any] | None = None
        self._order: _KerasOrder | None = None

    def get_torch_dataloader(self) -> Iterable[Any]:
        """One pass over the data."""
        return _Pass(self)

    def on_epoch_begin(self) -> None:
        """Passed on to the data."""
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Passed on to the data; Keras calls it first when the model is built."""
        self._inner.on_epoch_end()
        self._builds = False

    @property
    def num_batches(self) -> int | None:
        """Global batches of an epoch, when known."""
        return self._inner.num_batches  # type: ignore[no-any-return]

    @property
    def batch_size(self) -> int | None:
        """Examples of a global batch, when known."""
        return self._inner.batch_size  # type: ignore[no-any-return]

    @property
    def has_partial_batch(self) -> bool | None:
        """Whether the last batch is smaller."""
        return self._inner.has_partial_batch  # type: ignore[no-any-return]

    @property
    def partial_batch_size(self) -> int | None:
        """Size of that one."""
        return self._inner.partial_batch_size  # type: ignore[no-any-return]

    # ---- passes -----------------------------------------------------------------------------------------------

    def begin(self) -> Any:
        """What Keras does when a pass begins, with the random numbers that it takes for that."""
        if isinstance(self._inner, ArrayDataAdapter):
            loader = self._inner.get_torch_dataloader()
            iter(loader)
            return loader
        return None

    def batches(self, loader: Any) -> Iterator[Any]:
        """The batches of a pass.

        Args:
            loader: what ``begin`` gave.
        """
        if self._dataset is None:
            self._dataset = self._distribute(loader)
        iterator: Iterator[Any] = iter(self._dataset)
        if self._order is not None:
            self._order.draw(loader)
            with torch.random.fork_rng(devices=[]):  # reading by share draws others than Keras does
                iterator = itertools.chain([next(iterator)], iterator)
        for batch in iterator:
            if self._builds:
                _, batch = usable(select_replica(0, batch) if self._strategy.worker.num_local_replicas > 1 else batch)
            yield batch

    def _distribute(self, loader: Any) -> Iterable[Any]:
        worker = self._strategy.worker
        if loader is not None:
            self._order = _KerasOrder(loader, worker)
            size, layout = int(self._inner.batch_size), Request(worker).layout
            options = {"collate_fn": loader.collate_fn}
            policy = AutoShardPolicy.DATA
            pipeline = SamplerPipeline(loader.dataset, self._order, size, False, layout, policy, options)
            plan = Plan(pipeline, policy, size, len(self._order), "reads these only")
            return DistributedDataset(worker, plan, InputOptions(), None)
        if isinstance(self._inner, Batches):
            return self._inner
        if isinstance(self._inner, TorchDataLoaderAdapter):
            return self._strategy.experimental_distribute_dataset(self._inner.get_torch_dataloader())
        return self._strategy.experimental_distribute_dataset(_Stream(self._inner, worker.group))


class _Pass:
    """One pass; like a ``DataLoader`` it draws random numbers when it is iterated over, the rest at the first batch."""

    def __init__(self, data: DistributedInput) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return self._data.batches(self._data.begin())


class _KerasOrder(EpochOrder):
    """The order in which Keras reads arrays on one device; worker 0 draws it for all."""

    def __init__(self, loader: Any, worker: Worker) -> None:
        self._worker = worker
        self._drawn: list[int] = []
        sampler = loader.batch_sampler
        while hasattr(sampler, "sampler"):
            sampler = sampler.sampler
        self._size = len(sampler)

    def draw(self, loader: Any) -> None:
        """Draws the order of the next epoch; on all workers, so that their random numbers stay alike."""
        self._drawn = [int(i) for batch in loader.batch_sampler for i in batch]

    def indices(self, epoch: int) -> Sequence[Any] | torch.Tensor:
        """See ``EpochOrder``; with several workers a collective call."""
        drawn = torch.tensor(self._drawn, dtype=torch.int64, device="cpu")
        if self._worker.group.size > 1:
            self._worker.group.broadcast(drawn, 0, "input: order of the epoch")
        return drawn

    def __len__(self) -> int:
        return self._size


class _Stream:
    """Batches that every worker reads alike: workers whose random numbers differ take the same ones first."""

    def __init__(self, inner: Any, group: WorkerGroup) -> None:
        self._inner, self._group = inner, group

    def __iter__(self) -> Iterator[Any]:
        agree_on_random_numbers(self._group)
        return iter(self._inner.get_torch_dataloader())


def agree_on_random_numbers(group: WorkerGroup) -> None:
    """Seeds Python's, NumPy's and torch's random numbers alike on all workers, unless they are alike already."""
    if group.size == 1:
        return
    of_numpy: Any = np.random.get_state()
    states = [np.asarray(part).tobytes() for part in of_numpy[1:]]
    text = repr([random.getstate(), states, torch.get_rng_state().numpy().tobytes()])
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    proposal = random.Random(text).getrandbits(32)
    told = group.gather_objects([digest, proposal], "input: random numbers")
    if any(t[0] != told[0][0] for t in told):
        seed = int(told[0][1])
        seed_python(seed)
        torch.manual_seed(seed)
