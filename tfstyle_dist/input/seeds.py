"""The random numbers of a DataLoader's processes."""

from __future__ import annotations

import torch

from tfstyle_dist.input.sampler import mixed_seed


class LoaderSeeds:
    """Gives the processes of a worker's ``DataLoader`` other seeds than those of other workers, e.g. to augment with.

    Args:
        given: the program's generator for the loader; ``None``: torch's random numbers, which advance as they would.
        worker: number of this worker.

    Attributes:
        generator: for the loader.
    """

    def __init__(self, given: torch.Generator | None, worker: int) -> None:
        self._draws, self._number = given is None, worker + 1
        self.generator = torch.Generator()
        if given is not None:
            self.generator.manual_seed(mixed_seed(given.initial_seed(), self._number))

    def begin_epoch(self) -> None:
        """To be called before the loader is iterated."""
        if self._draws:
            drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())  # as a DataLoader would
            self.generator.manual_seed(mixed_seed(drawn, self._number))
