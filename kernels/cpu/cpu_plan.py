"""The tables that the compiled sums of the CPU read: addresses and units of work, kept for calls of the same memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from tfstyle_dist_kernels.cpu.cpu_kernel import VECTOR_BYTES, lanes
from tfstyle_dist_kernels.cpu.cpu_llvm import element_bytes

# The running totals of one unit of work: enough for long reads, and enough units that threads end together.
MIN_UNIT_BYTES: Final = 1 << 15
MAX_UNIT_BYTES: Final = 1 << 20
UNITS_PER_THREAD: Final = 8


class Plan(NamedTuple):
    """The tables of ``cpu_kernel.Request``.

    Attributes:
        rows: the address of the rows.
        units: the address of the units.
        num_units: how many they are.
        left_out: the tensors whose output shares memory with a contribution other than element by element: they have
            no units.
        arrays: what holds the memory.
    """

    rows: int
    units: int
    num_units: int
    left_out: list[int]
    arrays: tuple[Any, Any]


@lru_cache(maxsize=64)
def make_plan(
    addresses: tuple[int, ...],
    numels: tuple[int, ...],
    name: str,
    out_name: str,
    num_threads: int,
    may_stream: bool,
) -> Plan:
    """The plan for a list of tensors.

    Args:
        addresses: those of the contributions, tensor by tensor, then those of the outputs.
        numels: the numbers of elements of the tensors.
        name: the dtype of the contributions.
        out_name: the dtype of the outputs.
        num_threads: how many threads will share the work.
        may_stream: whether outputs may be written past the caches.
    """
    n = len(addresses) // len(numels) - 1
    inputs = np.array(addresses[: -len(numels)], dtype=np.int64).reshape(-1, n)
    outs = np.array(addresses[-len(numels) :], dtype=np.int64)[:, None]
    sizes = np.array(numels, dtype=np.int64)[:, None]
    shared = (inputs < outs + sizes * element_bytes(out_name)) & (outs < inputs + sizes * element_bytes(name))
    if name == out_name:
        shared &= inputs != outs
    left_out = np.flatnonzero(shared.any(axis=1)).tolist()
    # Not past the caches where the line to be written was just read.
    is_streaming = (inputs != outs).all(axis=1, keepdims=True) & (outs % 64 == 0) & may_stream
    rows = np.hstack([inputs, outs, is_streaming.astype(np.int64)])
    unit = sum(numels) // (num_threads * UNITS_PER_THREAD) // lanes(name) * lanes(name)
    smallest, largest = (size // VECTOR_BYTES * lanes(name) for size in (MIN_UNIT_BYTES, MAX_UNIT_BYTES))
    unit = min(max(unit, smallest), largest)
    parts = [
        (rows.itemsize * rows.shape[1] * tensor, start, min(unit, numel - start))
        for tensor, numel in enumerate(numels)
        if tensor not in left_out
        for start in range(0, numel, unit)
    ]
    units = np.array(parts, dtype=np.int64)
    return Plan(rows.ctypes.data, units.ctypes.data, len(parts), left_out, (rows, units))
