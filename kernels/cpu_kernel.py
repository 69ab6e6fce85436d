"""The compiled n-ary sum of the CPU backend: numba, with vectors and memory accesses spelled out.

Loops are not left to the automatic vectoriser: it gives up on ten pointers that might overlap. Here a vector of
``VECTOR_BYTES`` is a type of its own (the compiler splits it into the machine's registers, AVX2 or AVX-512), additions
are written one by one in the order wanted, and neither reassociation nor fused multiply-add is allowed, so the bits
are those of ``reference.py``.

One call runs over a whole list of tensors. The work is cut into units of ``UNIT_BYTES``; every thread that calls
``run`` with the same ``state`` takes units from a common counter until none is left.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

from tfstyle_dist_kernels.cpu_steps import CHAIN, FOUR

VECTOR_BYTES: Final = 128  # of running totals; two AVX-512 or four AVX2 registers hide the latency of an addition
UNIT_BYTES: Final = 1 << 17
# A block of running totals stays in the first-level cache between the steps of a sum of more than 8 contributions.
BLOCK_BYTES: Final = 1 << 14

# numpy has no bfloat16 and numba no float16: their bits, in records whose field tells which of them it is.
HALF_KINDS: Final = {
    "float16": np.dtype([("float16", np.uint16)]),
    "bfloat16": np.dtype([("bfloat16", np.uint16)]),
}
_FLOAT16, _BFLOAT16 = (numba.from_dtype(kind) for kind in HALF_KINDS.values())
_HALF: Final = (_FLOAT16, _BFLOAT16)
_LLVM: Final = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.int8: ir.IntType(8),
    types.int16: ir.IntType(16),
    types.int32: ir.IntType(32),
    types.int64: ir.IntType(64),
}


class Vector(types.Type):  # type: ignore[misc]
    """A vector of ``VECTOR_BYTES`` of running totals, as numba's type system sees it."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.lanes = VECTOR_BYTES * 8 // dtype.bitwidth
        self.llvm = ir.VectorType(_LLVM[dtype], self.lanes)
        super().__init__(name=f"Vector({dtype})")


class _VectorModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


register_model(Vector)(_VectorModel)


def _vector_of(kind: Any) -> Vector:
    """The vector of running totals for an array type of the elements."""
    return Vector(types.float32 if kind.dtype in _HALF else kind.dtype)


def _splat(vector: Any, value: int) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def _load(typing_context: Any, kind: Any, address: Any) -> Any:
    """Loads a vector of elements and widens it to running totals."""
    vector = _vector_of(kind)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def load(element: Any, align: int) -> Any:
            pointer = builder.inttoptr(arguments[1], ir.VectorType(element, vector.lanes).as_pointer())
            return builder.load(pointer, align=align)

        if kind.dtype == _FLOAT16:
            return builder.fpext(load(ir.HalfType(), 2), vector.llvm)
        if kind.dtype == _BFLOAT16:  # the upper half of a float32
            integers = ir.VectorType(ir.IntType(32), vector.lanes)
            bits = builder.zext(load(ir.IntType(16), 2), integers)
            return builder.bitcast(builder.shl(bits, _splat(integers, 16)), vector.llvm)
        return load(vector.llvm.element, vector.dtype.bitwidth // 8)

    return vector(kind, types.int64), generate


def _rounded_to_bfloat16(builder: Any, vector: Vector, value: Any) -> Any:
    """Rounds to nearest, ties to even; a NaN stays one."""
    integers = ir.VectorType(ir.IntType(32), vector.lanes)
    bits = builder.bitcast(value, integers)
    is_odd = builder.and_(builder.lshr(bits, _splat(integers, 16)), _splat(integers, 1))
    bits = builder.lshr(builder.add(bits, builder.add(is_odd, _splat(integers, 0x7FFF))), _splat(integers, 16))
    bits = builder.select(builder.fcmp_unordered("uno", value, value), _splat(integers, 0x7FC0), bits)
    return builder.trunc(bits, ir.VectorType(ir.IntType(16), vector.lanes))


def _store(typing_context: Any, kind: Any, address: Any, value: Any) -> Any:
    """Rounds a vector of running totals to elements and stores it."""
    return _storing(kind, value, is_streaming=False)


def _stream(typing_context: Any, kind: Any, address: Any, value: Any) -> Any:
    """As ``_store``, past the caches; the address must be a multiple of 64."""
    return _storing(kind, value, is_streaming=True)


def _storing(kind: Any, vector: Vector, is_streaming: bool) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, align = arguments[2], 2 if kind.dtype in _HALF else vector.dtype.bitwidth // 8
        if kind.dtype == _FLOAT16:
            value = builder.fptrunc(value, ir.VectorType(ir.HalfType(), vector.lanes))
        elif kind.dtype == _BFLOAT16:
            value = _rounded_to_bfloat16(builder, vector, value)
        pointer = builder.inttoptr(arguments[1], value.type.as_pointer())
        stored = builder.store(value, pointer, align=64 if is_streaming else align)
        if is_streaming:
            stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(kind, types.int64, vector), generate


def _add(typing_context: Any, a: Any, b: Any) -> Any:
    """Adds two vectors; integers wrap around."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return (builder.fadd if isinstance(a.dtype, types.Float) else builder.add)(*arguments)

    return a(a, b), generate


def _divide(typing_context: Any, a: Any, divisor: Any) -> Any:
    """Divides a vector by a number, correctly rounded; integers stay as they are (the caller refuses them)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, number = arguments
        if not isinstance(a.dtype, types.Float):
            return value
        single = context.cast(builder, number, divisor, a.dtype)
        undefined = ir.Constant(value.type, ir.Undefined)
        first = builder.insert_element(undefined, single, ir.Constant(ir.IntType(32), 0))
        everywhere = builder.shuffle_vector(first, undefined, _splat(ir.VectorType(ir.IntType(32), a.lanes), 0))
        return builder.fdiv(value, everywhere)

    return a(a, divisor), generate


def _take(typing_context: Any, counters: Any, index: Any) -> Any:
    """Adds 1 to a counter that threads share, and returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(counters)(context, builder, arguments[0])
        pointer = builder.gep(array.data, [arguments[1]])
        # Sequentially consistent: what this thread stored, also past the caches, is seen by who reads the counter.
        builder.fence("seq_cst")
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(counters, types.int64), generate


def _copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        to, start = (builder.inttoptr(address, byte) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, start, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


load, store, stream, add, divide, take, copy_bytes = map(
    intrinsic, (_load, _store, _stream, _add, _divide, _take, _copy_bytes)
)


def _four(kind: Any, row: Any, first: int, offset: int) -> Any:
    """The pairwise sum of 4 contributions."""
    left = add(load(kind, row[first] + offset), load(kind, row[first + 1] + offset))
    return add(left, add(load(kind, row[first + 2] + offset), load(kind, row[first + 3] + offset)))


four = numba.njit(_four, no_cpython_wrapper=True)


def _sum_range(
    kind: Any,
    total_kind: Any,
    out_kind: Any,
    row: Any,
    out: int,
    steps: Any,
    divisor: float,
    scratch: int,
    is_streaming: bool,
    num_vectors: int,
    element_bytes: int,
    out_bytes: int,
) -> None:
    """Sums ``num_vectors`` whole vectors that start at the addresses in ``row`` to the address ``out``.

    A row of ``steps`` (see ``cpu_steps.py``) is one pass over a block.
    """
    block = BLOCK_BYTES // VECTOR_BYTES
    if steps.shape[0] == 1:
        block = max(num_vectors, 1)
    for start in range(0, num_vectors, block):
        end = min(start + block, num_vectors)
        for step in range(steps.shape[0]):
            first, last, shape = steps[step, 0], steps[step, 1], steps[step, 2]
            begin, low, high, target = steps[step, 3], steps[step, 4], steps[step, 5], steps[step, 6]
            for place in range(start, end):
                offset = place * element_bytes
                here = scratch + (place - start) * VECTOR_BYTES
                if shape == CHAIN:
                    if begin >= 0:
                        total = add(load(total_kind, here + begin * BLOCK_BYTES), load(kind, row[first] + offset))
                    else:
                        total = load(kind, row[first] + offset)
                    for index in range(first + 1, last):
                        total = add(total, load(kind, row[index] + offset))
                elif shape == FOUR:
                    total = four(kind, row, first, offset)
                else:
                    total = add(four(kind, row, first, offset), four(kind, row, first + 4, offset))
                for level in range(high - 1, low - 1, -1):
                    total = add(load(total_kind, here + level * BLOCK_BYTES), total)
                if target >= 0:
                    store(total_kind, here + target * BLOCK_BYTES, total)
                    continue
                if divisor != 0:
                    total = divide(total, divisor)
                if is_streaming:
                    stream(out_kind, out + place * out_bytes, total)
                else:
                    store(out_kind, out + place * out_bytes, total)


sum_range = numba.njit(_sum_range, no_cpython_wrapper=True)


def _run(
    kind: Any,
    total_kind: Any,
    out_kind: Any,
    addresses: Any,
    numels: Any,
    first_units: Any,
    steps: Any,
    divisor: float,
    may_stream: bool,
    state: Any,
    scratch: Any,
    num_levels: int,
) -> bool:
    """Sums units of the list until none is left; several threads may run it with the same ``state``.

    Args:
        kind: An empty array of the elements' dtype (uint16 for bfloat16).
        total_kind: An empty array of the running totals' dtype.
        out_kind: An empty array of the outputs' dtype.
        addresses: int64 [T, N + 1], the addresses of the contributions to each tensor and of its output.
        numels: int64 [T], the number of elements of each tensor.
        first_units: int64 [T + 1], the number of units before each tensor, and of all.
        steps: int64 [steps, 7], see ``_sum_range``.
        divisor: What to divide by, or 0.
        may_stream: Whether outputs that are no contribution are written past the caches.
        state: int64 [2] of zeros, shared: units taken, units finished.
        scratch: int64, this thread's own, of ``scratch_words(N, num_levels)``.
        num_levels: How many blocks of running totals ``steps`` uses.

    Returns:
        Whether this call finished the last of all units.
    """
    lanes = VECTOR_BYTES // total_kind.itemsize
    element_bytes, out_bytes = kind.itemsize, out_kind.itemsize
    unit_numel = UNIT_BYTES // total_kind.itemsize
    n, last_unit = addresses.shape[1] - 1, first_units[-1]
    shifted = scratch[:n]
    levels = (scratch.ctypes.data + 8 * n + 63) // 64 * 64
    ends = levels + num_levels * BLOCK_BYTES
    tensor, is_last = 0, False
    while True:
        unit = take(state, 0)
        if unit >= last_unit:
            return is_last
        while first_units[tensor + 1] <= unit:
            tensor += 1
        row = addresses[tensor]
        start = (unit - first_units[tensor]) * unit_numel
        count = min(unit_numel, numels[tensor] - start)
        whole = count // lanes
        out = row[n] + start * out_bytes
        is_streaming = may_stream and out % 64 == 0
        for index in range(n):
            shifted[index] = row[index] + start * element_bytes
            if row[index] == row[n]:  # the line to be written was just read
                is_streaming = False
        sum_range(
            kind, total_kind, out_kind, shifted, out, steps, divisor, levels, is_streaming, whole,
            lanes * element_bytes, lanes * out_bytes,
        )  # fmt: skip
        rest = count - whole * lanes
        if rest > 0:  # copied to where whole vectors can be read
            for index in range(n):
                here = ends + index * VECTOR_BYTES
                copy_bytes(here, shifted[index] + whole * lanes * element_bytes, rest * element_bytes)
                shifted[index] = here
            sum_range(
                kind, total_kind, out_kind, shifted, ends + n * VECTOR_BYTES, steps, divisor, levels, False, 1,
                lanes * element_bytes, lanes * out_bytes,
            )  # fmt: skip
            copy_bytes(out + whole * lanes * out_bytes, ends + n * VECTOR_BYTES, rest * out_bytes)
        is_last = take(state, 1) + 1 == last_unit


def has_float16() -> bool:
    """Whether this processor converts float16 itself; the functions that would do it instead are not there."""
    features = binding.get_host_cpu_features()
    return features.get("f16c", False) or not binding.get_process_triple().startswith(("x86", "i386", "i686"))


def scratch_words(n: int, num_levels: int) -> int:
    """The int64 words of scratch memory that one thread needs."""
    return n + (128 + num_levels * BLOCK_BYTES + (n + 1) * VECTOR_BYTES) // 8


def make_run(is_cached: bool) -> Any:
    """``run``, compiled at its first call for each dtype.

    Args:
        is_cached: Keep the machine code on disk (``__pycache__`` beside this file or, where that cannot be written,
            the user's cache folder).

    Raises:
        RuntimeError: There is no folder to keep it in.
    """
    return numba.njit(nogil=True, cache=is_cached)(_run)
