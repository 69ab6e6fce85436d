"""Seeds for the processes of a DataLoader: other ones on each worker that reads files of its own."""

from __future__ import annotations

from collections.abc import Iterator
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

    def begin_epoch(self, again: int | None = None) -> int:
        """To be called before the loader is iterated.

        Args:
            again: what was drawn when a pass began that goes on now.

        Returns:
            The number that was drawn, or this one.
        """
        device = torch.device("cpu") if self._given is None else self._given.device
        drawn = int(torch.empty((), dtype=torch.int64, device=device).random_(generator=self._given))
        drawn = drawn if again is None else again
        self.generator.manual_seed(mixed_seed(drawn, self._number))
        return drawn


def on_the_cpu() -> AbstractContextManager[Any]:
    """Inside, a ``DataLoader`` draws from its generator of the CPU, whatever the default device is."""
    return torch.device("cpu") if torch_internals.in_function_mode() else nullcontext()


class WithSeeds:
    """A ``DataLoader`` with seeds, for one pass.

    Args:
        loader: with their generator.
        seeds: begin another epoch.

    Attributes:
        pass_seed: what was drawn when the pass began, for one that goes on.
    """

    def __init__(self, loader: Any, seeds: LoaderSeeds) -> None:
        self._loader, self._seeds = loader, seeds
        self.pass_seed: int | None = None

    def __iter__(self) -> Iterator[Any]:
        with on_the_cpu(), nullcontext() if self.pass_seed is None else torch.random.fork_rng(devices=[]):
            self.pass_seed = self._seeds.begin_epoch(self.pass_seed)
            return iter(self._loader)


def may_be_entered(worker: Worker, num_workers: int) -> bool:
    """Whether another worker may go on where this one is in a pass, and is to draw what its loader's processes draw."""
    return worker.positions is not None and num_workers > 0
