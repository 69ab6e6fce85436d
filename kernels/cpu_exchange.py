"""The sum of two processes through shared memory: what is around the compiled kernel of ``cpu_pair.py``.

numba is imported, and the kernel compiled (or loaded from disk), in ``prepare``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from tfstyle_dist_kernels import cpu_sum

DONE, WAITS, WAKES, DIFFERS = range(4)
PART, COPIED, MEETING, SPINS = range(4)
ARRIVED, DIGEST, SLEEPS, SLOTS = range(4)

_NAMES: Final = {torch.float32: "float32", torch.float64: "float64"}
_REST_WORDS: Final = 64
_logger = logging.getLogger("tfstyle_dist.kernels")
_ready: set[torch.dtype] = set()

unavailable = cpu_sum.unavailable


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether values of this dtype can be summed."""
    return dtype in _NAMES


def is_ready(dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> bool:
    """Whether a sum of this dtype would start at once, with nothing left to import or to compile."""
    return dtype in _ready


def prepare(dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> None:
    """Imports numba and compiles the kernel for a dtype, or loads it from disk.

    Raises:
        RuntimeError: numba cannot be used here.
    """
    if dtype in _ready:
        return
    if (reason := unavailable()) is not None:
        raise RuntimeError(f"the compiled sum between processes cannot be used: {reason}")
    with cpu_sum.loading():
        begin = time.perf_counter()
        memory = torch.zeros(256, dtype=torch.int64)
        memory[0] = memory[8] = 1  # the other has come to the first meeting already
        words = [[memory[8 * r :].data_ptr() + 8 * k for k in (0, 1, 3)] for r in range(2)]
        slots = [memory[64 * (r + 1) :].data_ptr() for r in range(2)]
        places = Places([[*w, s, s] for w, s in zip(words, slots, strict=True)], 0, 128)
        PairSum(places, [torch.zeros(1, dtype=dtype)], None, 0, 0, 0).go_on()
        _ready.add(dtype)
        _logger.info("loaded the sum between processes for %s in %.2f s", dtype, time.perf_counter() - begin)


@cache
def _run() -> Any:
    from tfstyle_dist_kernels import cpu_pair

    return cpu_sum.cached(cpu_pair.make_run)


@cache
def _kind(dtype: torch.dtype) -> Any:
    import numpy as np

    return np.empty(0, _NAMES[dtype])


class Places:
    """Where two processes meet.

    Args:
        addresses: for each rank those of the words ``ARRIVED``, ``DIGEST`` and ``SLEEPS`` and of its two slots.
        rank: this process's, 0 or 1.
        part_bytes: how much goes through a slot at once.
    """

    def __init__(self, addresses: Sequence[Sequence[int]], rank: int, part_bytes: int) -> None:
        import numpy as np

        self.table, self.rank, self.part_bytes = np.array(addresses, dtype=np.int64), rank, part_bytes
        self.rest = np.empty(_REST_WORDS, dtype=np.int64)


class PairSum:
    """One sum of two processes, in place.

    Args:
        places: where they meet.
        tensors: this process's values: contiguous, plain tensors of one dtype for which the kernel ``is_ready``.
        divisor: what the sums are divided by.
        digest: a number that stands for what this process is about to do.
        meeting: the number of the last meeting.
        looks: how often to look for the other before it counts as waiting.
    """

    def __init__(
        self,
        places: Places,
        tensors: Sequence[Tensor],
        divisor: int | None,
        digest: int,
        meeting: int,
        looks: int,
    ) -> None:
        import numpy as np

        self._alive = tensors  # an address is good as long as its tensor lives
        self._state = np.array([0, 0, meeting, looks], dtype=np.int64)
        pieces = np.array([t.data_ptr() for t in tensors], dtype=np.int64)
        ends = np.array([t.numel() for t in tensors], dtype=np.int64).cumsum()
        dtype = tensors[0].dtype
        self._arguments = (
            _kind(dtype), pieces, ends, places.part_bytes // dtype.itemsize, places.table, digest,
            float(divisor or 0), places.rank, self._state, places.rest,
        )  # fmt: skip

    def go_on(self) -> int:
        """Sums until it is ``DONE``, it ``WAITS`` for the other, the other sleeps (``WAKES``) or ``DIFFERS``."""
        return int(_run()(*self._arguments))

    @property
    def meeting(self) -> int:
        """The number of the last meeting that this process came to."""
        return int(self._state[MEETING])
