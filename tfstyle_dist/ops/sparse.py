"""Sums of sparse COO tensors: the entries are concatenated in order, then those at one place are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tfstyle_dist.core import torch_internals
from tfstyle_dist_kernels import reference


def sum_sparse(contributions: Sequence[Tensor], divisor: int | float | None = None) -> Tensor:
    """The coalesced sum of sparse COO tensors of one shape and dtype.

    Args:
        contributions: At least one, with equally many sparse dimensions.
        divisor: What to divide the sum by.
    """
    first = contributions[0]
    # The entries of a tensor that is not coalesced have no public access, and coalescing each first would
    # sort everything twice.
    indices = torch.cat([torch_internals.indices_of(t) for t in contributions], dim=1)
    values = torch.cat([torch_internals.values_of(t) for t in contributions])
    values = values.to(reference.accumulation_dtype(first.dtype))
    total = _make(indices, values, first.shape, is_coalesced=False).coalesce()
    sums = total.values()
    if divisor is not None:
        reference.divide_(sums, divisor)
    if sums.dtype == first.dtype:
        return total
    return _make(total.indices(), sums.to(first.dtype), first.shape, is_coalesced=True)


def all_dense(contributions: Sequence[Tensor]) -> Sequence[Tensor]:
    """The contributions, the sparse ones of them made dense."""
    if all(t.layout is torch.strided for t in contributions):
        return contributions
    return [t if t.layout is torch.strided else sum_sparse([t]).to_dense() for t in contributions]


def _make(indices: Tensor, values: Tensor, shape: torch.Size, *, is_coalesced: bool) -> Tensor:
    # The parts come from valid tensors: checking every index again would cost a pass (and a wait on a GPU).
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)
