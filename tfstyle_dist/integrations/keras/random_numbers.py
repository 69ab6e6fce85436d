"""torch's random numbers during steps: workers that were seeded alike must not drop the same units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tfstyle_dist.core.devices import accelerator, is_accelerator
from tfstyle_dist.input.sampler import mixed_seed
from tfstyle_dist.strategies.base import Strategy


class RandomNumbers:
    """A stream for the steps of each of several workers, which leaves the program's numbers alike on all of them.

    It is seeded by the number that the program would draw next, and by the worker's rank. That number is drawn, once,
    when a step has used random numbers: so the next ``fit`` has other ones, and the order of the data is that of one
    device where no step uses any.

    Args:
        strategy: its workers; with a single one steps draw the program's numbers.
    """

    def __init__(self, strategy: Strategy) -> None:
        places = [place.torch_device for place in strategy.worker.devices if is_accelerator(place.type)]
        self._rank, self._devices = strategy.worker.group.rank, list(dict.fromkeys(places))
        self._several = strategy.worker.group.size > 1
        self._states: list[torch.Tensor] | None = None
        self._drawn = False

    @contextmanager
    def of_this_worker(self) -> Iterator[None]:
        """Inside, random numbers come from the worker's own stream; afterwards the program's go on."""
        if not self._several:
            yield
            return
        before = self._get()
        if self._states is None:
            torch.manual_seed(mixed_seed(_draw(), 1 + self._rank))
        else:
            self._set(self._states)
        begun = self._get()
        try:
            yield
        finally:
            self._states = self._get()
            self._set(before)
            if not self._drawn and not all(map(torch.equal, begun, self._states)):
                self._drawn = True
                _draw()

    def _get(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(accelerator(d.type).get_rng_state(d) for d in self._devices)]

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            accelerator(device.type).set_rng_state(state, device)


def _draw() -> int:
    """The next number of the program's stream."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
