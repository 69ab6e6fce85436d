"""Seeds for the processes of a DataLoader: other ones on each worker that reads files of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.input.sampler import mixed_seed
from tfstyle_dist.runtime.worker import Worker


class LoaderSeeds:
    """Gives the processes of a worker's ``DataLoader`` other seeds than those of other workers, e.g. to augment with.

    Args:
        given: the program's generator for the loader, which advances as it would; ``None``: torch's random numbers.
        worker: number of this worker.

    Attributes:
        generator: for the loader, on the CPU.
    """

    def __init__(self, given: torch.Generator | None, worker: int) -> None:
        self._given, self._number = given, worker + 1
        self.generator = torch.Generator()

    def begin_epoch(self) -> None:
        """To be called before the loader is iterated."""
        device = torch.device("cpu") if self._given is None else self._given.device
        drawn = int(torch.empty((), dtype=torch.int64, device=device).random_(generator=self._given))
        self.generator.manual_seed(mixed_seed(drawn, self._number))


def on_the_cpu() -> AbstractContextManager[Any]:
    """Inside, a ``DataLoader`` draws from its generator of the CPU, whatever the default device is."""
    return torch.device("cpu") if torch_internals.in_function_mode() else nullcontext()


class WithSeeds:
    """A ``DataLoader`` with seeds, for one pass.

    Args:
        loader: with their generator.
        seeds: begin another epoch.
    """

    def __init__(self, loader: Any, seeds: LoaderSeeds) -> None:
        self._loader, self._seeds = loader, seeds

    def __iter__(self) -> Iterator[Any]:
        self._seeds.begin_epoch()
        with on_the_cpu():
            return iter(self._loader)


class SeededPass:
    """One pass over a ``DataLoader``, whose processes' seeds depend on a seed and the epoch alone.

    Args:
        loader: as the program made it.
        seed: the same on all workers.
        epoch: number of the epoch.
    """

    def __init__(self, loader: Any, seed: int, epoch: int) -> None:
        self._loader, self._seed = loader, mixed_seed(seed, epoch)

    def __iter__(self) -> Iterator[Any]:
        own, self._loader.generator = self._loader.generator, torch.Generator().manual_seed(self._seed)
        try:
            with on_the_cpu():
                return iter(self._loader)
        finally:
            self._loader.generator = own


def seed_of_processes(worker: Worker, loader_options: Mapping[str, Any]) -> int | None:
    """What a loader's processes draw comes from it, where a worker may go on in the middle of a pass of another one.

    Args:
        worker: the worker and its group.
        loader_options: of the loader.

    Returns:
        The seed of torch's random numbers on the first worker; ``None``: the processes draw as in torch.
    """
    if worker.positions is None or not loader_options.get("num_workers"):
        return None
    return int(worker.group.gather_objects(torch.initial_seed(), "input: seed of the loader's processes")[0])
