"""The orders of summation as short programs for the CPU kernel: one row of numbers for each pass over a block.

A row is (first contribution, end, shape, start, low, high, target): sum the contributions from ``first`` to ``end`` in
the given shape, beginning with the running total at level ``start`` (-1: with the first contribution); add to it the
totals at the levels from ``high - 1`` down to ``low``; write it to level ``target`` (-1: to the output). Levels are
blocks of scratch memory that stay in the cache.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, TypeAlias

# Shapes of up to 8 contributions, added in registers: from left to right, or pairwise for exactly 4 or 8.
CHAIN: Final = 0
FOUR: Final = 4
EIGHT: Final = 8
# Not a sum of any number: the second contribution, times a number, is added to the first.
SCALED: Final = 2

OUT: Final = -1
Row: TypeAlias = tuple[int, int, int, int, int, int, int]


@lru_cache(maxsize=512)
def steps(n: int, order: str) -> tuple[tuple[Row, ...], int]:
    """The rows for N contributions, and the number of levels they use.

    Args:
        n: the number of contributions, at least 1.
        order: ``"add_n"``, ``"tree"`` or ``"accumulate_n"``; ``"update"`` for ``SCALED``.
    """
    rows = {"add_n": _add_n, "tree": _tree, "accumulate_n": _accumulate_n, "update": _update}[order](n)
    *_, last = rows
    rows[-1] = (*last[:6], OUT)
    return tuple(rows), 1 + max(row[6] for row in rows)


def _add_n(n: int) -> list[Row]:
    head = min(n, (n - 2) % 8 + 2)
    rows: list[Row] = [(0, head, CHAIN, OUT, 0, 0, 0)]
    return rows + [(first, first + 8, CHAIN, OUT, 0, 1, 0) for first in range(head, n, 8)]


def _accumulate_n(n: int) -> list[Row]:
    return [(first, min(first + 8, n), CHAIN, 0 if first else OUT, 0, 0, 0) for first in range(0, n, 8)]


def _update(n: int) -> list[Row]:
    return [(0, n, SCALED, OUT, 0, 0, 0)]


def _tree(n: int) -> list[Row]:
    """A binary counter: as soon as two totals of equally many contributions are there, they become one."""
    rows: list[Row] = []
    sizes: list[int] = []  # of the totals at the levels
    first = 0
    while first < n:
        count = next(size for size in (8, 4, 3, 2, 1) if size <= n - first)
        high = len(sizes)
        total = count
        while sizes and (sizes[-1] == total or first + count == n):
            total += sizes.pop()
        shape = count if count in (FOUR, EIGHT) else CHAIN
        rows.append((first, first + count, shape, OUT, len(sizes), high, len(sizes)))
        sizes.append(total)
        first += count
    return rows
