"""Sums of processes through shared memory: what is around the compiled code of ``cpu_pair.py`` and ``cpu_slices.py``.

llvmlite is imported, and the code compiled, in ``prepare``.
"""

from __future__ import annotations

import abc
import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from tfstyle_dist_kernels.cpu import cpu_compile, cpu_sum
from tfstyle_dist_kernels.cpu.cpu_steps import steps
from tfstyle_dist_kernels.cpu.cpu_threads import ALONE

DONE, WAITS, WAKES, DIFFERS = range(4)
# The words of a row of a table: three addresses of words, and those of two slots.
ARRIVED, DIGEST, SLEEPS, SLOTS = range(4)
PLACES: Final = 5

_SLEEPS: Final = 25  # of 2 ms, before the caller looks whether the others still live
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
        dtype: Of the values.
        num_ranks: How many processes sum; for two, every order is the same.
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
    """Where processes meet.

    Args:
        addresses: for each rank those of the words ``ARRIVED``, ``DIGEST`` and ``SLEEPS`` and of its two slots.
        results: those of the two slots for sums.
        last: that of the word at which processes sleep.
        rank: this process's number.
        part_bytes: how much goes through a slot at once.
    """

    def __init__(
        self, addresses: Sequence[Sequence[int]], results: Sequence[int], last: int, rank: int, part_bytes: int
    ) -> None:
        self.last = last
        self.num_ranks, self.rank, self.part_bytes = len(addresses), rank, part_bytes
        self.places = (ctypes.c_int64 * (self.num_ranks * PLACES))(*(a for row in addresses for a in row))
        self.results = (ctypes.c_int64 * 2)(*results)

    def row(self, rank: int) -> int:
        """The address of a process's row."""
        return ctypes.addressof(self.places) + 8 * PLACES * rank


def beginner(table: Table, order: str) -> Callable[..., LaneSum]:
    """What begins sums of the processes of a table: called with tensors, divisor, digest, meeting and looks."""
    return partial(PairSum, table) if table.num_ranks == 2 else partial(SlicedSum, table, order)


class LaneRequest(ctypes.Structure):
    """What the code of a sum is called with; addresses are those of int64 arrays.

    Attributes:
        pieces: The address of [T], the addresses of the tensors that follow each other in the vector of values.
        starts: The address of [T + 1]: where each of them begins in it, and where the last one ends, in elements.
        num_pieces: T.
        part_numel: How many elements go through the slots at once.
        digest: Of what this process is about to do.
        divisor: What to divide the sum by, or 0.
        looks: How often to look for the others before they count as late.
        meeting: The number of the last meeting.
        answer: Why the call came back.
    """

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (
        ("pieces", ctypes.c_int64),
        ("starts", ctypes.c_int64),
        ("num_pieces", ctypes.c_int64),
        ("part_numel", ctypes.c_int64),
        ("digest", ctypes.c_int64),
        ("divisor", ctypes.c_double),
        ("looks", ctypes.c_int64),
        ("meeting", ctypes.c_int64),
        ("answer", ctypes.c_int64),
    )


class LaneSum(abc.ABC):
    """One sum of several processes, in place.

    Args:
        tensors: this process's values: contiguous, plain tensors of one dtype for which the code ``is_ready``.
        divisor: what the sums are divided by.
        digest: a number that stands for what this process is about to do.
        meeting: the number of the last meeting.
        looks: how often to look for the others before they count as late.
    """

    _code: int
    _request: Any

    def __init__(self, tensors: Sequence[Tensor], divisor: int | None, digest: int, meeting: int, looks: int) -> None:
        count = len(tensors)
        pieces = (ctypes.c_int64 * count)(*map(Tensor.data_ptr, tensors))
        starts = (ctypes.c_int64 * (count + 1))(*accumulate(map(Tensor.numel, tensors), initial=0))
        self._values = tensors, pieces, starts  # an address is good as long as what is there lives
        self._common = {
            "pieces": ctypes.addressof(pieces),
            "starts": ctypes.addressof(starts),
            "num_pieces": count,
            "digest": digest,
            "divisor": divisor or 0,
            "looks": looks,
            "meeting": meeting,
        }

    def go_on(self) -> int:
        """Sums until it is ``DONE``, it ``WAITS`` for others, some sleep (``WAKES``) or a process ``DIFFERS``."""
        ALONE.run(self._code, ctypes.addressof(self._request))
        return int(self._request.answer)

    @property
    def meeting(self) -> int:
        """The number of the last meeting that this process came to."""
        return int(self._request.meeting)


class PairSum(LaneSum):
    """One sum of two processes: each adds the other's values to its own."""

    def __init__(self, table: Table, tensors: Sequence[Tensor], *how: Any) -> None:
        from tfstyle_dist_kernels.cpu.cpu_pair import Request

        super().__init__(tensors, *how)
        self._table, dtype = table, tensors[0].dtype
        self._code = _pairs[dtype]
        self._request = Request(
            part_numel=table.part_bytes // dtype.itemsize,
            mine=table.row(table.rank),
            other=table.row(1 - table.rank),
            is_first=table.rank == 0,
            **self._common,
        )


class SlicedSum(LaneSum):
    """One sum of several processes: each sums a slice of all values."""

    def __init__(self, table: Table, order: str, tensors: Sequence[Tensor], *how: Any) -> None:
        from tfstyle_dist_kernels.cpu import cpu_kernel
        from tfstyle_dist_kernels.cpu.cpu_slices import Request

        super().__init__(tensors, *how)
        dtype, count = tensors[0].dtype, table.num_ranks
        row, unit = (ctypes.c_int64 * (count + 2))(), (ctypes.c_int64 * cpu_kernel.UNIT_WORDS)()
        share = ctypes.c_int64()
        scratch = (ctypes.c_char * (cpu_kernel.scratch_bytes(steps(count, order)[1]) + 64))()
        slice_sum = cpu_kernel.Request(
            units=ctypes.addressof(unit),
            num_units=1,
            rows=ctypes.addressof(row),
            scratch=(ctypes.addressof(scratch) + 63) // 64 * 64,
            num_threads=1,
            shares=ctypes.addressof(share),
        )
        self._alive = table, row, unit, share, scratch, slice_sum
        self._code = _slices[dtype]
        self._request = Request(
            part_numel=table.part_bytes // dtype.itemsize,
            places=ctypes.addressof(table.places),
            results=ctypes.addressof(table.results),
            num_ranks=count,
            rank=table.rank,
            sleeps=_SLEEPS,
            last=table.last,
            system_call=_system_call(),
            sum=cpu_sum.prepare(dtype, dtype, count, order, False),
            sum_request=ctypes.addressof(slice_sum),
            sum_row=ctypes.addressof(row),
            sum_unit=ctypes.addressof(unit),
            sum_share=ctypes.addressof(share),
            **self._common,
        )
