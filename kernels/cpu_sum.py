"""The compiled CPU backend: a list of n-ary sums in one pass over memory, with the bits of ``reference.py``.

llvmlite is imported, and code compiled, at the first call that needs it or in ``prepare``.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import chain
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from tfstyle_dist_kernels import cpu_compile, cpu_threads, reference
from tfstyle_dist_kernels.cpu_steps import steps

# Below this traffic a second thread costs more than it saves.
SHARED_ABOVE_BYTES: Final = 1 << 18
# Outputs of a call with more traffic than the caches hold are written past them: they would be evicted before anybody
# reads them, and the lines need not be read first.
STREAMED_ABOVE_BYTES: Final = 32 << 20
# The running totals of one unit of work: enough for long reads, and enough units that threads end together.
MIN_UNIT_BYTES: Final = 1 << 15
MAX_UNIT_BYTES: Final = 1 << 20
UNITS_PER_THREAD: Final = 8

_NAMES: Final = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.complex64: "float32",
    torch.complex128: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.uint8: "int8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
}
_PLAIN: Final = {Tensor, torch.nn.Parameter}

_logger = logging.getLogger("tfstyle_dist.kernels")
_code: dict[tuple[str, str, int, str, bool], int] = {}
_local = threading.local()

unavailable = cpu_compile.unavailable


def is_ready(dtype: torch.dtype, out_dtype: torch.dtype, n: int, order: str, divides: bool) -> bool:
    """Whether such a sum would start at once, with nothing left to import or to compile."""
    return (_NAMES.get(dtype, ""), _NAMES.get(out_dtype, ""), n, order, divides) in _code


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for this dtype; the others are summed by ``reference.py``."""
    return dtype in _NAMES


def prepare(dtype: torch.dtype, out_dtype: torch.dtype, n: int, order: str, divides: bool) -> int:
    """Imports llvmlite and compiles one kind of sum, if that has not been done.

    Args:
        dtype: The dtype of the contributions.
        out_dtype: The dtype of the output.
        n: The number of contributions.
        order: The order of summation.
        divides: Whether the sum is divided.

    Returns:
        The address of the code.

    Raises:
        RuntimeError: The backend is unavailable.
    """
    key = (_NAMES[dtype], _NAMES[out_dtype], n, order, divides)
    code = _code.get(key)
    if code is not None:
        return code
    with cpu_compile.compiling():
        if key not in _code:
            begin = time.perf_counter()
            kernel = _kernel()
            _code[key] = kernel.compile_program(kernel.Program(*key))
            _logger.info("compiled the sum of %d x %s on the CPU in %.2f s", n, key[0], time.perf_counter() - begin)
        return _code[key]


@cache
def _kernel() -> ModuleType:
    from tfstyle_dist_kernels import cpu_kernel

    return cpu_kernel


@torch.no_grad()
def sum_lists(
    contributions: Sequence[Sequence[Tensor]],
    outs: Sequence[Tensor],
    order: str,
    *,
    divisor: int | float | None = None,
) -> None:
    """Sums the contributions to each tensor of a list.

    Tensors that the kernel cannot take (other strides than the output's, partly overlapping memory, tensor subclasses)
    are summed by ``reference.py``. Autograd is not told that outputs change.

    Args:
        contributions: ``contributions[t][i]`` is contribution i to tensor t: dense CPU tensors of one dtype, equally
            many for each tensor and of its shape. They are taken as checked.
        outs: Where to write; ``outs[t]`` has the contributions' dtype or, for float16 and bfloat16, float32. It may
            share memory with contributions to tensor t, not with those to others.
        order: ``"add_n"``, ``"tree"`` or ``"accumulate_n"``.
        divisor: Divides the sums, before they are rounded, by a true division.

    Raises:
        RuntimeError: The backend is unavailable.
        ValueError: An unknown order, a list without contributions, or lists of different lengths.
    """
    if len(contributions) != len(outs):
        raise ValueError(f"{len(contributions)} tensors have contributions but {len(outs)} outputs are given")
    reference.check_order(order)
    if not outs:
        return
    if not contributions[0]:
        raise ValueError("there is nothing to sum: give at least one contribution")
    if any(len(parts) != len(contributions[0]) for parts in contributions):
        counts = sorted({len(parts) for parts in contributions})
        raise ValueError(f"the tensors have {counts} contributions: sum those of one number in a call of their own")
    dtype, out_dtype = contributions[0][0].dtype, outs[0].dtype
    if not _takes(dtype, divisor):
        reference.sum_lists(contributions, outs, order, divisor=divisor)
        return
    code = prepare(dtype, out_dtype, len(contributions[0]), order, divisor is not None)
    if not _are_contiguous(chain(chain.from_iterable(contributions), outs)):
        simple = [_is_simple(parts, out) for parts, out in zip(contributions, outs, strict=True)]
        left = [t for t, is_simple in enumerate(simple) if not is_simple]
        reference.sum_lists([contributions[t] for t in left], [outs[t] for t in left], order, divisor=divisor)
        contributions = [parts for parts, is_simple in zip(contributions, simple, strict=True) if is_simple]
        outs = [out for out, is_simple in zip(outs, simple, strict=True) if is_simple]
        if not outs:
            return
    table = _Table(contributions, outs)
    overlapping = table.find_overlaps()
    if overlapping:
        reference.sum_lists(
            [contributions[t] for t in overlapping], [outs[t] for t in overlapping], order, divisor=divisor
        )
        table.leave_out(overlapping)
    table.run(code, order, divisor, torch.get_num_threads())


def _takes(dtype: torch.dtype, divisor: int | float | None) -> bool:
    if divisor is not None and abs(divisor) > 2**53:
        return False  # might be rounded twice on its way to float32
    return dtype in _NAMES and (dtype != torch.float16 or _has_float16())


@cache
def _has_float16() -> bool:
    from tfstyle_dist_kernels import cpu_llvm

    return cpu_llvm.has_float16()


def _are_contiguous(tensors: Iterable[Tensor]) -> bool:
    """Whether all are plain row-major tensors, as nearly all are; each test runs over the whole list at once."""
    tensors = list(tensors)
    return (
        set(map(type, tensors)) <= _PLAIN
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and not (tensors[0].is_complex() and any(map(Tensor.is_conj, tensors)))
    )


def _is_simple(parts: Sequence[Tensor], out: Tensor) -> bool:
    """Whether all are plain tensors with their elements at the same places."""
    if type(out) not in _PLAIN or out.is_neg() or out.is_conj():
        return False
    strides = None
    if not out.is_contiguous():
        order = sorted(range(out.dim()), key=out.stride, reverse=True)
        if not out.permute(order).is_contiguous():
            return False
        strides = out.stride()
    for part in parts:
        if type(part) not in _PLAIN or part.is_neg() or part.is_conj():
            return False
        if not part.is_contiguous() if strides is None else part.stride() != strides:
            return False
    return True


class _Table:
    """Addresses and sizes of a list of tensors."""

    def __init__(self, contributions: Sequence[Sequence[Tensor]], outs: Sequence[Tensor]) -> None:
        import numpy as np

        self._np, self._alive = np, (contributions, outs)  # an address is good as long as its tensor lives
        self.n = len(contributions[0])
        inputs = np.fromiter(map(Tensor.data_ptr, chain.from_iterable(contributions)), np.int64)
        self.rows = np.zeros((len(outs), self.n + 2), dtype=np.int64)
        self.rows[:, :-2] = inputs.reshape(-1, self.n)
        self.rows[:, -2] = np.fromiter(map(Tensor.data_ptr, outs), np.int64)
        factor = 2 if outs[0].is_complex() else 1
        self.numels = np.fromiter(map(Tensor.numel, outs), np.int64) * factor
        self.name, self.itemsize = _NAMES[contributions[0][0].dtype], contributions[0][0].itemsize // factor
        self.out_name, self.out_itemsize = _NAMES[outs[0].dtype], outs[0].itemsize // factor

    def find_overlaps(self) -> list[int]:
        """The tensors whose output shares memory with a contribution other than element by element."""
        inputs, outs = self.rows[:, :-2], self.rows[:, -2:-1]
        numels = self.numels[:, None]
        shared = (inputs < outs + numels * self.out_itemsize) & (outs < inputs + numels * self.itemsize)
        if self.name == self.out_name:
            shared &= inputs != outs
        return [int(t) for t in self._np.flatnonzero(shared.any(axis=1))] if shared.any() else []

    def leave_out(self, tensors: Sequence[int]) -> None:
        """Drops tensors."""
        self.rows = self._np.delete(self.rows, tensors, axis=0)
        self.numels = self._np.delete(self.numels, tensors)

    def run(self, code: int, order: str, divisor: int | float | None, num_threads: int) -> None:
        """Sums them all in one pass, in up to ``num_threads`` threads."""
        kernel, numels = _kernel(), self.numels.tolist()
        num_bytes = sum(numels) * (self.n * self.itemsize + self.out_itemsize)
        if num_bytes <= SHARED_ABOVE_BYTES:
            num_threads = 1
        if num_bytes > STREAMED_ABOVE_BYTES:  # but where the line to be written was just read
            inputs, outs = self.rows[:, :-2], self.rows[:, -2:-1]
            self.rows[:, -1:] = (inputs != outs).all(axis=1, keepdims=True) & (outs % 64 == 0)
        units, units_address = _units(tuple(numels), self.n, kernel.lanes(self.name), num_threads)
        scratch = _scratch(num_threads * kernel.scratch_bytes(steps(self.n, order)[1]) + 64)
        request = kernel.Request(
            units_address,
            len(units),
            self.rows.__array_interface__["data"][0],
            (scratch.__array_interface__["data"][0] + 63) // 64 * 64,
            divisor or 0,
        )
        cpu_threads.run(code, ctypes.addressof(request), num_threads if len(units) > 1 else 1)


@lru_cache(maxsize=64)
def _units(numels: tuple[int, ...], n: int, lanes: int, num_threads: int) -> tuple[Any, int]:
    """The parts of the work, as ``cpu_kernel.Request`` describes them, and their address."""
    import numpy as np

    kernel = _kernel()
    smallest, largest = (size // kernel.VECTOR_BYTES * lanes for size in (MIN_UNIT_BYTES, MAX_UNIT_BYTES))
    unit = min(max(sum(numels) // (num_threads * UNITS_PER_THREAD) // lanes * lanes, smallest), largest)
    rows = [
        (8 * (n + 2) * tensor, start, min(unit, numel - start))
        for tensor, numel in enumerate(numels)
        for start in range(0, numel, unit)
    ]
    units = np.array(rows, dtype=np.int64)
    return units, units.__array_interface__["data"][0]


def _scratch(nbytes: int) -> Any:
    """Scratch memory for one call in this thread, kept from call to call."""
    import numpy as np

    scratch = getattr(_local, "scratch", None)
    if scratch is None or len(scratch) < nbytes:
        scratch = _local.scratch = np.empty(nbytes, dtype=np.uint8)
    return scratch
