"""torch's random numbers during steps: workers that were seeded alike must not drop the same units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tfstyle_dist.input.sampler import mixed_seed
from tfstyle_dist.strategies.base import Strategy


class RandomNumbers:
    """A stream for the steps of each worker but the first, whose numbers are those of the program.

    Args:
        strategy: its workers.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._rank, self._device = strategy.worker.group.rank, strategy.worker.torch_device(0)
        self._states: list[torch.Tensor] | None = None

    @contextmanager
    def of_this_worker(self) -> Iterator[None]:
        """Inside, random numbers come from the worker's own stream; afterwards the program's go on."""
        if self._rank == 0:
            yield
            return
        before = self._get()
        if self._states is None:
            torch.manual_seed(mixed_seed(torch.initial_seed(), self._rank))
        else:
            self._set(self._states)
        try:
            yield
        finally:
            self._states = self._get()
            self._set(before)

    def _get(self) -> list[torch.Tensor]:
        on_gpu = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *on_gpu]

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], self._device)
