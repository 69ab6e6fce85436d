"""The sum of two processes through shared memory: what is around the compiled code of ``cpu_pair.py``.

llvmlite is imported, and the code compiled, in ``prepare``.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from tfstyle_dist_kernels import cpu_compile
from tfstyle_dist_kernels.cpu_threads import ALONE

DONE, WAITS, WAKES, DIFFERS = range(4)
ARRIVED, DIGEST, SLEEPS, SLOTS = range(4)

_NAMES: Final = {torch.float32: "float32", torch.float64: "float64"}
_logger = logging.getLogger("tfstyle_dist.kernels")
_code: dict[torch.dtype, int] = {}

unavailable = cpu_compile.unavailable


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether values of this dtype can be summed."""
    return dtype in _NAMES


def is_ready(dtype: torch.dtype) -> bool:
    """Whether a sum of this dtype would start at once, with nothing left to import or to compile."""
    return dtype in _code


def prepare(dtype: torch.dtype) -> None:
    """Imports llvmlite and compiles the code for a dtype.

    Raises:
        RuntimeError: llvmlite cannot be used here.
    """
    if dtype in _code:
        return
    with cpu_compile.compiling():
        begin = time.perf_counter()
        from tfstyle_dist_kernels import cpu_pair

        _code[dtype] = cpu_pair.compile_pair(_NAMES[dtype])
        _logger.info("compiled the sum between processes for %s in %.2f s", dtype, time.perf_counter() - begin)


class Places:
    """Where two processes meet.

    Args:
        addresses: for each rank those of the words ``ARRIVED``, ``DIGEST`` and ``SLEEPS`` and of its two slots.
        rank: this process's, 0 or 1.
        part_bytes: how much goes through a slot at once.
    """

    def __init__(self, addresses: Sequence[Sequence[int]], rank: int, part_bytes: int) -> None:
        self.words = [(ctypes.c_int64 * len(words))(*words) for words in addresses]
        self.rank, self.part_bytes = rank, part_bytes


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
        from tfstyle_dist_kernels.cpu_pair import Request

        dtype, count = tensors[0].dtype, len(tensors)
        pieces = (ctypes.c_int64 * count)(*map(Tensor.data_ptr, tensors))
        starts = (ctypes.c_int64 * (count + 1))(*accumulate(map(Tensor.numel, tensors), initial=0))
        self._alive = tensors, pieces, starts, places  # an address is good as long as what is there lives
        self._code = _code[dtype]
        self._request = Request(
            pieces=ctypes.addressof(pieces),
            starts=ctypes.addressof(starts),
            num_pieces=count,
            part_numel=places.part_bytes // dtype.itemsize,
            mine=ctypes.addressof(places.words[places.rank]),
            other=ctypes.addressof(places.words[1 - places.rank]),
            is_first=places.rank == 0,
            digest=digest,
            divisor=divisor or 0,
            looks=looks,
            meeting=meeting,
        )

    def go_on(self) -> int:
        """Sums until it is ``DONE``, it ``WAITS`` for the other, the other sleeps (``WAKES``) or ``DIFFERS``."""
        ALONE.run(self._code, ctypes.addressof(self._request))
        return int(self._request.answer)

    @property
    def meeting(self) -> int:
        """The number of the last meeting that this process came to."""
        return int(self._request.meeting)
