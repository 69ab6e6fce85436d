"""torch's random numbers during steps: workers that were seeded alike must not drop the same units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tfstyle_dist.core.devices import accelerator, is_accelerator
from tfstyle_dist.input.sampler import mixed_seed
from tfstyle_dist.strategies.base import Strategy


class RandomNumbers:
    """A stream for the steps of each worker but the first, whose numbers are those of the program.

    Args:
        strategy: its workers.
    """

    def __init__(self, strategy: Strategy) -> None:
        places = [place.torch_device for place in strategy.worker.devices if is_accelerator(place.type)]
        self._rank, self._devices = strategy.worker.group.rank, list(dict.fromkeys(places))
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
        return [torch.get_rng_state(), *(accelerator(d.type).get_rng_state(d) for d in self._devices)]

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            accelerator(device.type).set_rng_state(state, device)
