"""The compiled sum of two processes through memory that they share, for ``tfstyle_dist.comm``.

Each process copies a part of its values to its slot, says so in a word of the shared memory, waits for the word of the
other and adds the other's slot to its own values, where they are. All that happens in one call, without the
interpreter. The call comes back when the other lets it wait, or sleeps and must be woken: both are the caller's
business, who then calls again.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tfstyle_dist_kernels.cpu_exchange import (
    ARRIVED,
    COPIED,
    DIFFERS,
    DIGEST,
    DONE,
    MEETING,
    PART,
    SLEEPS,
    SLOTS,
    SPINS,
    WAITS,
    WAKES,
)
from tfstyle_dist_kernels.cpu_kernel import VECTOR_BYTES, add, copy_bytes, divide, load, store


def _read_word(typing_context: Any, address: Any) -> Any:
    """Reads a word that another process may write; what it wrote before is seen afterwards."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


def _write_word(typing_context: Any, address: Any, value: Any) -> Any:
    """Writes a word for another process, after all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


read_word, write_word = map(intrinsic, (_read_word, _write_word))


def _add_other(kind: Any, mine: int, other: int, numel: int, divisor: float, is_first: bool, rest_place: int) -> None:
    """Replaces the elements at ``mine`` by their sum with those at ``other``, divided, in the order of the ranks."""
    lanes = VECTOR_BYTES // kind.itemsize
    for start in range(0, numel, lanes):
        offset = start * kind.itemsize
        a, b = mine + offset, other + offset
        size = min(lanes, numel - start) * kind.itemsize
        if size < VECTOR_BYTES:  # copied to where a whole vector can be read
            copy_bytes(rest_place, a, size)
            copy_bytes(rest_place + VECTOR_BYTES, b, size)
            a, b = rest_place, rest_place + VECTOR_BYTES
        first, second = (a, b) if is_first else (b, a)
        total = add(load(kind, first), load(kind, second))
        if divisor != 0:
            total = divide(total, divisor)
        store(kind, a, total)
        if size < VECTOR_BYTES:
            copy_bytes(mine + offset, rest_place, size)


add_other = numba.njit(_add_other, no_cpython_wrapper=True)


def _run(
    kind: Any,
    pieces: Any,
    ends: Any,
    part_numel: int,
    places: Any,
    digest: int,
    divisor: float,
    rank: int,
    state: Any,
    rest: Any,
) -> int:
    """Sums this process's values and those of the other, as far as it goes without waiting long.

    Args:
        kind: An empty array of the elements' dtype.
        pieces: int64 [T], the addresses of the tensors that follow each other in the vector of values.
        ends: int64 [T], where each of them ends in it, in elements.
        part_numel: How many elements go through the slots at once.
        places: int64 [2, 5], for each rank the addresses of its words (``ARRIVED``, ``DIGEST``, of two words,
            ``SLEEPS``) and of its two slots (``SLOTS``).
        digest: Of what this process is about to do.
        divisor: What to divide the sum by, or 0.
        rank: 0 or 1.
        state: int64 [4]: the part under way, whether it was copied in, the number of the last meeting, and how often to
            look before it ``WAITS``.
        rest: Memory of two vectors.

    Returns:
        ``DONE``; ``WAITS`` for the other to come to meeting ``MEETING``; ``WAKES``: the other sleeps; ``DIFFERS``: the
        other does something else, and the values of this part are as they were.
    """
    mine, other = places[rank], places[1 - rank]
    numel, piece = ends[-1], 0
    while True:
        start = state[PART] * part_numel
        if start >= numel and state[PART] > 0:
            return DONE
        stop = min(start + part_numel, numel)
        while ends[piece] <= start and piece < len(pieces) - 1:
            piece += 1
        if state[COPIED] == 0:
            slot, here, place = mine[SLOTS + state[MEETING] % 2], start, piece
            while here < stop:
                first = ends[place - 1] if place > 0 else 0
                count = min(stop, ends[place]) - here
                source = pieces[place] + (here - first) * kind.itemsize
                copy_bytes(slot + (here - start) * kind.itemsize, source, count * kind.itemsize)
                here += count
                place += 1
            state[MEETING] += 1
            write_word(mine[DIGEST] + 8 * (state[MEETING] % 2), digest)
            write_word(mine[ARRIVED], state[MEETING])
            state[COPIED] = 1
            if read_word(other[SLEEPS]) != 0:
                return WAKES
        looks = 0
        while read_word(other[ARRIVED]) < state[MEETING]:
            looks += 1
            if looks > state[SPINS]:
                return WAITS
        if read_word(other[DIGEST] + 8 * (state[MEETING] % 2)) != digest:
            return DIFFERS
        slot, here, place = other[SLOTS + 1 - state[MEETING] % 2], start, piece
        while here < stop:
            first = ends[place - 1] if place > 0 else 0
            count = min(stop, ends[place]) - here
            target = pieces[place] + (here - first) * kind.itemsize
            their = slot + (here - start) * kind.itemsize
            add_other(kind, target, their, count, divisor, rank == 0, rest.ctypes.data)
            here += count
            place += 1
        state[PART] += 1
        state[COPIED] = 0


def make_run(is_cached: bool) -> Any:
    """``run``, compiled at its first call for each dtype; see ``cpu_kernel.make_run``."""
    return numba.njit(nogil=True, cache=is_cached)(_run)
