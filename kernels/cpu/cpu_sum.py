"""The compiled CPU backend: a list of n-ary sums in one pass over memory, with the bits of ``reference.py``.

llvmlite is imported, and code compiled, at the first call that needs it or in ``prepare``.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tfstyle_dist_kernels import reference
from tfstyle_dist_kernels.cpu import cpu_compile
from tfstyle_dist_kernels.cpu.cpu_steps import steps
from tfstyle_dist_kernels.cpu.cpu_threads import ALONE, find_team

if TYPE_CHECKING:
    from tfstyle_dist_kernels.cpu.cpu_plan import Plan

# Below this traffic a second thread costs more than it saves.
SHARED_ABOVE_BYTES: Final = 1 << 18
# Outputs of a call with more traffic than the caches hold are written past them: they would be evicted before anybody
# reads them, and the lines need not be read first.
STREAMED_ABOVE_BYTES: Final = 32 << 20

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

unavailable = cpu_compile.unavailable


def is_ready(dtype: torch.dtype, out_dtype: torch.dtype, n: int, order: str, divides: bool) -> bool:
    """Whether such a sum would start at once, with nothing left to import or to compile."""
    return (_NAMES.get(dtype, ""), _NAMES.get(out_dtype, ""), n, order, divides) in _code


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for this dtype; the others are summed by ``reference.py``."""
    return dtype in _NAMES


def prepare(dtype: torch.dtype, out_dtype: torch.dtype, n: int, order: str, divides: bool) -> int:
    """Imports llvmlite and compiles one kind of sum or update, if that has not been done.

    Args:
        dtype: the dtype of the contributions.
        out_dtype: the dtype of the output.
        n: the number of contributions.
        order: the order of summation, or ``"update"``.
        divides: whether the sum is divided.

    Returns:
        The address of the code.

    Raises:
        RuntimeError: the backend is unavailable.
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
            seconds = time.perf_counter() - begin
            what = "update" if order == "update" else "sum"
            _logger.info("compiled the %s of %d x %s on the CPU in %.2f s", what, n, key[0], seconds)
        return _code[key]


@cache
def _kernel() -> ModuleType:
    from tfstyle_dist_kernels.cpu import cpu_kernel

    return cpu_kernel


@cache
def _planner() -> Callable[..., Plan]:
    from tfstyle_dist_kernels.cpu.cpu_plan import make_plan

    return make_plan


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
        outs: where to write; ``outs[t]`` has the contributions' dtype or, for float16 and bfloat16, float32. It may
            share memory with contributions to tensor t, not with those to others.
        order: ``"add_n"``, ``"tree"`` or ``"accumulate_n"``.
        divisor: divides the sums, before they are rounded, by a true division.

    Raises:
        RuntimeError: the backend is unavailable.
        ValueError: an unknown order, a list without contributions, or lists of different lengths.
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
    if not are_plain(chain(chain.from_iterable(contributions), outs)):
        simple = [_is_simple(parts, out) for parts, out in zip(contributions, outs, strict=True)]
        left = [t for t, is_simple in enumerate(simple) if not is_simple]
        reference.sum_lists([contributions[t] for t in left], [outs[t] for t in left], order, divisor=divisor)
        contributions = [parts for parts, is_simple in zip(contributions, simple, strict=True) if is_simple]
        outs = [out for out, is_simple in zip(outs, simple, strict=True) if is_simple]
        if not outs:
            return
    left_out = run(code, contributions, outs, order, divisor or 0)
    if left_out:
        parts, targets = [contributions[t] for t in left_out], [outs[t] for t in left_out]
        reference.sum_lists(parts, targets, order, divisor=divisor)


def run(
    code: int,
    contributions: Sequence[Sequence[Tensor]],
    outs: Sequence[Tensor],
    order: str,
    operand: float,
    *,
    streamed_above_bytes: int = STREAMED_ABOVE_BYTES,
) -> list[int]:
    """Runs code over tensors in one pass, in up to ``torch.get_num_threads()`` threads.

    Args:
        code: what ``prepare`` gave for these dtypes, this number of contributions and this order.
        contributions: row-major tensors, as in ``sum_lists``.
        outs: likewise.
        order: the order of summation.
        operand: the divisor or the scale, if the code has one.
        streamed_above_bytes: with more traffic than this the outputs are written past the caches.

    Returns:
        The numbers of the tensors that it had to leave out, because their memory overlaps partly.
    """
    first, out, n = contributions[0][0], outs[0], len(contributions[0])
    numels = tuple(map(Tensor.numel, outs))
    num_bytes = sum(numels) * (n * first.itemsize + out.itemsize)
    team = find_team(torch.get_num_threads()) if num_bytes > SHARED_ABOVE_BYTES else ALONE
    if first.is_complex():
        numels = tuple(2 * numel for numel in numels)
    plan = _planner()(
        (*map(Tensor.data_ptr, chain.from_iterable(contributions)), *map(Tensor.data_ptr, outs)),
        numels,
        _NAMES[first.dtype],
        _NAMES[out.dtype],
        team.num_threads,
        num_bytes > streamed_above_bytes,
    )
    if plan.num_units < 2:
        team = ALONE
    shares = (ctypes.c_int64 * team.num_threads)()
    request = _kernel().Request(
        plan.units,
        plan.num_units,
        plan.rows,
        _scratch.take(team.num_threads * _kernel().scratch_bytes(steps(n, order)[1])),
        operand,
        team.num_threads,
        ctypes.addressof(shares),
        team.thread_number,
    )
    team.run(code, ctypes.addressof(request))
    return plan.left_out


def _takes(dtype: torch.dtype, divisor: int | float | None) -> bool:
    if divisor is not None and abs(divisor) > 2**53:
        return False  # might be rounded twice on its way to float32
    return dtype in _NAMES and (dtype != torch.float16 or _has_float16())


@cache
def _has_float16() -> bool:
    from tfstyle_dist_kernels.cpu import cpu_llvm

    return cpu_llvm.has_float16()


def are_plain(tensors: Iterable[Tensor]) -> bool:
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


class _Scratch(threading.local):
    """Memory for one call in a thread, kept from call to call."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._address = 0

    def take(self, nbytes: int) -> int:
        """The address of at least so many bytes, a multiple of 64."""
        if self._buffer.numel() < nbytes + 64:
            self._buffer = torch.empty(nbytes + 64, dtype=torch.uint8)
            self._address = (self._buffer.data_ptr() + 63) // 64 * 64
        return self._address


_scratch = _Scratch()
