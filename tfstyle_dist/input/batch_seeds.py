"""Seeds by batch for the processes of a loader: they draw the same whichever batches they have read before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tfstyle_dist.runtime.random_streams import seed_of, seed_python


class SeededIndices(list[Any]):
    """The samples of one batch. A process of a loader that gets them draws from the batch's seed from then on.

    What it gets is a plain list: the seeds are set while the message is read, which a loader does for one batch after
    the other.

    Args:
        indices: of the samples.
        seed: of the pass.
        place: of the batch in the pass.
    """

    def __init__(self, indices: list[Any], seed: int, place: int) -> None:
        super().__init__(indices)
        self._seed = seed_of(f"{seed} {place}".encode())

    def __reduce__(self) -> tuple[Callable[..., list[Any]], tuple[Any, ...]]:
        return _begin_batch, (list(self), self._seed)


def _begin_batch(indices: list[Any], seed: int) -> list[Any]:
    torch.default_generator.manual_seed(seed)
    seed_python(seed)
    return indices
