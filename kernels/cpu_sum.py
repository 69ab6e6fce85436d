"""The compiled CPU backend: a list of n-ary sums in one pass over memory, with the bits of ``reference.py``.

numba is imported, and the kernel compiled (or loaded from disk), at the first call that needs it or in ``prepare``.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from tfstyle_dist_kernels import cpu_threads, reference
from tfstyle_dist_kernels.cpu_steps import steps

# Below this traffic a second thread costs more than it saves.
SHARED_ABOVE_BYTES: Final = 2 << 20
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
_PLAIN: Final = (Tensor, torch.nn.Parameter)

_logger = logging.getLogger("tfstyle_dist.kernels")
_lock = threading.RLock()
_ready: set[tuple[str, str]] = set()
_local = threading.local()
_was_forked_while_loading = False


def unavailable() -> str | None:
    """Why this backend cannot be used here, or ``None`` if it can. It does not import numba."""
    if _was_forked_while_loading:
        return "this process was forked while its parent was loading numba"
    return _missing()


@cache
def _missing() -> str | None:
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed: pip install 'tfstyle_dist[cpu]'"
    return None


def is_ready(dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> bool:
    """Whether a sum of this dtype would start at once, with nothing left to import or to compile."""
    return (_NAMES.get(dtype, ""), _NAMES.get(out_dtype or dtype, "")) in _ready


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for this dtype; the others are summed by ``reference.py``."""
    return dtype in _NAMES


def prepare(dtype: torch.dtype, out_dtype: torch.dtype | None = None) -> None:
    """Imports numba and compiles the kernel for a dtype, or loads it from disk; says so in the log if it takes long.

    Args:
        dtype: The dtype of the contributions.
        out_dtype: The dtype of the output, ``dtype`` by default.

    Raises:
        RuntimeError: The backend is unavailable.
    """
    key = (_NAMES[dtype], _NAMES[out_dtype or dtype])
    if key in _ready:
        return
    if (reason := unavailable()) is not None:
        raise RuntimeError(f"the numba backend cannot be used: {reason}")
    with loading():
        if key in _ready or not _takes(dtype, None):
            return
        begin = time.perf_counter()
        ones = [torch.ones(1, dtype=dtype) for _ in range(2)]
        table = _Table([ones], [torch.empty(1, dtype=out_dtype or dtype)], *key)
        table.run("add_n", None, 1)
        _ready.add(key)
        _logger.info("loaded the CPU kernel for %s in %.2f s", key[0], time.perf_counter() - begin)


@cache
def _kernel() -> ModuleType:
    from tfstyle_dist_kernels import cpu_kernel

    return cpu_kernel


@cache
def _run() -> Any:
    return cached(_kernel().make_run)


def cached(make_run: Callable[[bool], Any]) -> Any:
    """A kernel that is kept on disk once it is compiled, or, where no folder can be written, one that is not."""
    try:
        return make_run(True)
    except RuntimeError as error:
        _logger.warning("the CPU kernel is compiled anew in every process: %s; set NUMBA_CACHE_DIR", error)
        return make_run(False)


@contextmanager
def loading() -> Iterator[None]:
    """One thread loads at a time; a process that is forked meanwhile knows that it cannot use numba."""
    with _lock:
        yield


@cache
def _kind(name: str) -> Any:
    """The empty array that tells the kernel a dtype."""
    import numpy as np

    return np.empty(0, _kernel().HALF_KINDS.get(name, name))


@cache
def _rows(n: int, order: str) -> tuple[Any, int]:
    import numpy as np

    rows, num_levels = steps(n, order)
    return np.array(rows, dtype=np.int64), num_levels


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
    prepare(dtype, out_dtype)
    simple = [_is_simple(parts, out) for parts, out in zip(contributions, outs, strict=True)]
    if not all(simple):
        left = [t for t, is_simple in enumerate(simple) if not is_simple]
        reference.sum_lists([contributions[t] for t in left], [outs[t] for t in left], order, divisor=divisor)
        contributions = [parts for parts, is_simple in zip(contributions, simple, strict=True) if is_simple]
        outs = [out for out, is_simple in zip(outs, simple, strict=True) if is_simple]
        if not outs:
            return
    table = _Table(contributions, outs, _NAMES[dtype], _NAMES[out_dtype])
    overlapping = table.find_overlaps()
    if overlapping:
        reference.sum_lists(
            [contributions[t] for t in overlapping], [outs[t] for t in overlapping], order, divisor=divisor
        )
        table.leave_out(overlapping)
    table.run(order, divisor, torch.get_num_threads())


def _takes(dtype: torch.dtype, divisor: int | float | None) -> bool:
    if divisor is not None and abs(divisor) > 2**53:
        return False  # might be rounded twice on its way to float32
    return dtype in _NAMES and (dtype != torch.float16 or _has_float16())


@cache
def _has_float16() -> bool:
    with _lock:
        return bool(_kernel().has_float16())


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

    def __init__(
        self, contributions: Sequence[Sequence[Tensor]], outs: Sequence[Tensor], name: str, out_name: str
    ) -> None:
        import numpy as np

        self._np, self._alive = np, (contributions, outs)  # an address is good as long as its tensor lives
        self.kind, self.out_kind = _kind(name), _kind(out_name)
        self.total_kind = _kind("float32") if name in _kernel().HALF_KINDS else self.kind
        self.n = len(contributions[0])
        rows = [[t.data_ptr() for t in (*parts, out)] for parts, out in zip(contributions, outs, strict=True)]
        self.addresses = np.array(rows, dtype=np.int64)
        factor = 2 if outs[0].is_complex() else 1
        self.numels = np.array([out.numel() * factor for out in outs], dtype=np.int64)

    def find_overlaps(self) -> list[int]:
        """The tensors whose output shares memory with a contribution other than element by element."""
        inputs, outs, numels = self.addresses[:, :-1], self.addresses[:, -1:], self.numels[:, None]
        shared = (inputs < outs + numels * self.out_kind.itemsize) & (outs < inputs + numels * self.kind.itemsize)
        if self.kind is self.out_kind:
            shared &= inputs != outs
        return [int(t) for t in self._np.flatnonzero(shared.any(axis=1))] if shared.any() else []

    def leave_out(self, tensors: Sequence[int]) -> None:
        """Drops tensors."""
        self.addresses = self._np.delete(self.addresses, tensors, axis=0)
        self.numels = self._np.delete(self.numels, tensors)

    def run(self, order: str, divisor: int | float | None, num_threads: int) -> None:
        """Sums them all in one pass, in up to ``num_threads`` threads."""
        np, kernel, run = self._np, _kernel(), _run()
        rows, num_levels = _rows(self.n, order)
        units = np.zeros(len(self.numels) + 1, dtype=np.int64)
        unit_numel = kernel.UNIT_BYTES // self.total_kind.itemsize
        np.cumsum(-(-self.numels // unit_numel), out=units[1:])
        num_bytes = int(self.numels.sum()) * (self.n * self.kind.itemsize + self.out_kind.itemsize)
        state = np.zeros(2, dtype=np.int64)
        words = kernel.scratch_words(self.n, num_levels)
        arguments = (
            self.kind, self.total_kind, self.out_kind, self.addresses, self.numels, units, rows, float(divisor or 0),
            num_bytes > STREAMED_ABOVE_BYTES, state,
        )  # fmt: skip

        def work() -> bool:
            return bool(run(*arguments, _scratch(words), num_levels))

        if int(units[-1]) == 0:
            return
        if num_threads > 1 and num_bytes > SHARED_ABOVE_BYTES and units[-1] > 1:
            cpu_threads.share(work, min(num_threads, int(units[-1])))
        else:
            work()


def _scratch(words: int) -> Any:
    """This thread's scratch memory, kept from call to call."""
    import numpy as np

    scratch = getattr(_local, "scratch", None)
    if scratch is None or len(scratch) < words:
        scratch = _local.scratch = np.empty(words, dtype=np.int64)
    return scratch


def _before_fork() -> None:
    global _fork_found_lock
    _fork_found_lock = _lock.acquire(blocking=False)


def _after_fork_in_parent() -> None:
    if _fork_found_lock:
        _lock.release()


def _after_fork_in_child() -> None:
    global _lock, _was_forked_while_loading
    if not _fork_found_lock:  # numba's own locks are held by a thread that does not exist here
        _was_forked_while_loading = True
    _lock = threading.RLock()


_fork_found_lock = True
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
