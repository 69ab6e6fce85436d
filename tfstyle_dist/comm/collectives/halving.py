"""Recursive halving and doubling between members, with the sums in the shape of the tree.

The tree over N members splits at the largest power of two below N. The members therefore fall into blocks, the binary
digits of N from the largest on: 7 = 4 + 2 + 1. In a block, members at distance 1, 2, 4, ... exchange halves of what
they hold and add; each ends with the block's sum of its share. A block then adds the sum of all blocks after it, and
the results go back the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Messages = Sequence[tuple[int, torch.Tensor]]
Exchange = Callable[[Messages, Messages], None]
"""Sends tensors to, and receives tensors from, members by their index; returns when all have come and gone."""


def blocks_of(size: int) -> list[tuple[int, int]]:
    """First member and number of members of each block, largest first."""
    blocks, first = [], 0
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            blocks.append((first, 1 << bit))
            first += 1 << bit
    return blocks


def share_of(index: int, members: int, numel: int) -> tuple[int, int]:
    """What the member at ``index`` of a block holds after all halvings among ``members`` (a power of two)."""
    low, high, distance = 0, numel, 1
    while distance < members:
        middle = (low + high) // 2
        low, high = (middle, high) if index & distance else (low, middle)
        distance *= 2
    return low, high


def tree_all_reduce(buffer: torch.Tensor, index: int, size: int, exchange: Exchange) -> None:
    """Replaces ``buffer`` by the sum over all members, added as ``reference.tree`` adds them in the order of indices.

    Args:
        buffer: flat and contiguous, equally long on all members.
        index: this member's number, 0 to ``size - 1``.
        size: number of members.
        exchange: moves tensors between members.
    """
    numel, scratch = buffer.numel(), torch.empty_like(buffer[: (buffer.numel() + 1) // 2 if size > 1 else 0])
    blocks = blocks_of(size)
    mine = next(k for k, (first, count) in enumerate(blocks) if first <= index < first + count)
    first, members = blocks[mine]
    own = index - first

    def share(other: int, count: int) -> torch.Tensor:
        low, high = share_of(other, count, numel)
        return buffer[low:high]

    distance = 1
    while distance < members:  # halving
        keep, give = share(own, 2 * distance), share(own ^ distance, 2 * distance)
        got = scratch[: keep.numel()]
        exchange([(first + (own ^ distance), give)], [(first + (own ^ distance), got)])
        _add(keep, got, after=not own & distance)
        distance *= 2
    held = share(own, members)
    if mine + 1 < len(blocks):  # the sum of the later blocks
        after_first, after_members = blocks[mine + 1]
        got = torch.empty_like(held)
        exchange([], [(after_first + own % after_members, got)])
        held.add_(got)
    if mine > 0:  # to the earlier block, and the result back from it
        before_first, before_members = blocks[mine - 1]
        partners = range(own, before_members, members)
        messages = [(before_first + p, share(p, before_members)) for p in partners]
        exchange(messages, [])
        exchange([], messages)
    if mine + 1 < len(blocks):
        exchange([(after_first + own % after_members, held)], [])
    while distance > 1:  # doubling
        distance //= 2
        have, want = share(own, 2 * distance), share(own ^ distance, 2 * distance)
        exchange([(first + (own ^ distance), have)], [(first + (own ^ distance), want)])


def _add(mine: torch.Tensor, other: torch.Tensor, after: bool) -> None:
    """The left branch first; the order shows in the payload of a NaN alone."""
    if after:
        mine.add_(other)
    else:
        torch.add(other, mine, out=mine)
