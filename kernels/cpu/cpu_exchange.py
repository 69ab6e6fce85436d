"""Sums of processes through shared memory: what is around the compiled code of ``cpu_pair.py`` and ``cpu_slices.py``.

llvmlite is imported, and the code compiled, in ``prepare``.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from tfstyle_dist_kernels.cpu import cpu_compile, cpu_sum
from tfstyle_dist_kernels.cpu.cpu_request import ROW_WORDS, Request
from tfstyle_dist_kernels.cpu.cpu_steps import steps
from tfstyle_dist_kernels.cpu.cpu_threads import ALONE

_NAPS: Final = 25  # of 2 ms, before the caller looks whether the others still live
_NAMES: Final = {torch.float32: "float32", torch.float64: "float64"}
_logger = logging.getLogger("tfstyle_dist.kernels")
_pairs: dict[torch.dtype, int] = {}
_slices: dict[torch.dtype, int] = {}

unavailable = cpu_compile.unavailable


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether values of this dtype can be summed."""
    return dtype in _NAMES


def is_ready(dtype: torch.dtype, num_ranks: int = 2, order: str = "add_n") -> bool:
    """Whether a sum of this kind would start at once, with nothing left to import or to compile."""
    if num_ranks == 2:
        return dtype in _pairs
    return dtype in _slices and cpu_sum.is_ready(dtype, dtype, num_ranks, order, False)


def prepare(dtype: torch.dtype, num_ranks: int = 2, order: str = "add_n") -> None:
    """Imports llvmlite and compiles what a kind of sum needs.

    Args:
        dtype: of the values.
        num_ranks: how many processes sum; for two, every order is the same.
        order: ``"add_n"``, ``"tree"`` or ``"accumulate_n"``.

    Raises:
        RuntimeError: llvmlite cannot be used here.
    """
    if is_ready(dtype, num_ranks, order):
        return
    with cpu_compile.compiling():
        begin = time.perf_counter()
        if num_ranks == 2:
            from tfstyle_dist_kernels.cpu import cpu_pair

            _pairs[dtype] = cpu_pair.compile_pair(_NAMES[dtype])
        else:
            from tfstyle_dist_kernels.cpu import cpu_slices

            cpu_sum.prepare(dtype, dtype, num_ranks, order, False)
            if dtype not in _slices:
                _slices[dtype] = cpu_slices.compile_slices(_NAMES[dtype])
        seconds = time.perf_counter() - begin
        _logger.info("compiled the sum between %d processes for %s in %.2f s", num_ranks, dtype, seconds)


@cache
def _system_call() -> int:
    return ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value or 0


class Table:
    """Where the shared memory of the processes is.

    Args:
        workers: for each rank the addresses of its words (``cpu_request.ARRIVED``, ``DIGEST`` and ``SLEEPS``) and of
            its two staging areas.
        results: those of the two areas for sums.
        sleep: that of the word at which processes sleep.
        rank: this process's number.
        part_bytes: how much goes through a staging area at once.
    """

    def __init__(
        self, workers: Sequence[Sequence[int]], results: Sequence[int], sleep: int, rank: int, part_bytes: int
    ) -> None:
        self.sleep, self.num_ranks, self.rank, self.part_bytes = sleep, len(workers), rank, part_bytes
        self.rows = (ctypes.c_int64 * (self.num_ranks * ROW_WORDS))(*(a for row in workers for a in row))
        self.results = (ctypes.c_int64 * 2)(*results)


def beginner(table: Table, order: str) -> Callable[..., Exchange]:
    """What begins sums of the processes of a table: called with tensors, divisor, digest, count and looks."""
    return partial(Exchange, table) if table.num_ranks == 2 else partial(SlicedExchange, order, table)


class Exchange:
    """One sum of two processes, in place: each adds the other's values to its own.

    Args:
        table: where their memory is.
        tensors: this process's values: contiguous, plain tensors of one dtype for which the code ``is_ready``.
        divisor: what the sums are divided by.
        digest: a number that stands for what this process is about to do.
        count: how many barriers this process has come to.
        looks: how often to look for the others before it sleeps.
    """

    _codes = _pairs

    def __init__(
        self, table: Table, tensors: Sequence[Tensor], divisor: int | None, digest: int, count: int, looks: int
    ) -> None:
        number, dtype = len(tensors), tensors[0].dtype
        pieces = (ctypes.c_int64 * number)(*map(Tensor.data_ptr, tensors))
        starts = (ctypes.c_int64 * (number + 1))(*accumulate(map(Tensor.numel, tensors), initial=0))
        self._alive: list[Any] = [table, tensors, pieces, starts]  # an address is good as long as what is there lives
        self._code = self._codes[dtype]
        self._request = Request(
            pieces=ctypes.addressof(pieces),
            starts=ctypes.addressof(starts),
            num_pieces=number,
            part_numel=table.part_bytes // dtype.itemsize,
            digest=digest,
            divisor=divisor or 0,
            rows=ctypes.addressof(table.rows),
            num_ranks=table.num_ranks,
            rank=table.rank,
            count=count,
            looks=looks,
            naps=_NAPS,
            sleep=table.sleep,
            system_call=_system_call(),
        )

    def go_on(self) -> int:
        """Sums until it is ``DONE``, it ``WAITS`` for others or a process ``DIFFERS``."""
        ALONE.run(self._code, ctypes.addressof(self._request))
        return int(self._request.answer)

    @property
    def count(self) -> int:
        """How many barriers this process has come to."""
        return int(self._request.count)


class SlicedExchange(Exchange):
    """One sum of several processes, in place: each sums a slice of all values.

    Args:
        order: of the additions.
        table: see ``Exchange``, as the rest.
    """

    _codes = _slices

    def __init__(self, order: str, table: Table, tensors: Sequence[Tensor], *how: Any) -> None:
        from tfstyle_dist_kernels.cpu import cpu_kernel

        super().__init__(table, tensors, *how)
        dtype, num_ranks = tensors[0].dtype, table.num_ranks
        row, unit = (ctypes.c_int64 * (num_ranks + 2))(), (ctypes.c_int64 * cpu_kernel.UNIT_WORDS)()
        share = ctypes.c_int64()
        scratch = (ctypes.c_char * (cpu_kernel.scratch_bytes(steps(num_ranks, order)[1]) + 64))()
        slice_sum = cpu_kernel.Request(
            units=ctypes.addressof(unit),
            num_units=1,
            rows=ctypes.addressof(row),
            scratch=(ctypes.addressof(scratch) + 63) // 64 * 64,
            num_threads=1,
            shares=ctypes.addressof(share),
        )
        self._alive += [row, unit, share, scratch, slice_sum]
        request = self._request
        request.results = ctypes.addressof(table.results)
        request.sum = cpu_sum.prepare(dtype, dtype, num_ranks, order, False)
        request.sum_request, request.sum_row = ctypes.addressof(slice_sum), ctypes.addressof(row)
        request.sum_unit, request.sum_share = ctypes.addressof(unit), ctypes.addressof(share)
