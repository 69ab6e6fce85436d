"""Runs checked sums: sparse or dense, one tensor or a list, in the backend asked for or the one that fits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Final, cast

import torch
from torch import Tensor

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.ops import backends
from tfstyle_dist.ops.cost_model import ORDERS, Problem, describe
from tfstyle_dist_kernels import problems, reference

_METHODS: Final = {order: method for method, order in ORDERS.items()}


def sum_one(
    present: Sequence[Tensor], order: str, out: Tensor | None, divisor: int | float | None, backend: str
) -> Tensor:
    """The sum of checked contributions: ``out``, or a new tensor; to be called under ``torch.no_grad``."""
    first = present[0]
    if first.layout is not torch.strided and out is None and all(t.is_sparse for t in present):
        return _sum_sparse(present, divisor)
    dense = _all_dense(present)
    first = dense[0]
    nbytes = first.nbytes
    if backend == "auto":
        if nbytes * len(dense) < backends.SMALL_BYTES and len(dense) < backends.SMALL_COUNT and first.is_cpu:
            backend = "torch"
        else:
            backend = _choose(dense, 1, nbytes, first.dtype if out is None else out.dtype, order, divisor is not None)
    _log(len(dense), 1, nbytes, first, order, backend)
    if backend == "torch":
        return reference.sum_checked(dense, out, order, divisor=divisor)
    target = torch.empty_like(first) if out is None else out
    backends.explicit(backend, first.device).sum_lists([dense], [target], order, divisor=divisor)
    if out is not None:
        tell_autograd([out])
    return target


def sum_list(
    checked: Sequence[Sequence[Tensor]],
    order: str,
    outs: Sequence[Tensor] | None,
    divisor: int | float | None,
    backend: str,
    *,
    are_alike: bool = False,
) -> list[Tensor]:
    """The sums of checked contributions to each tensor; one call of the backend for each device, dtype and number.

    ``are_alike`` says that all tensors are known to be dense, of one dtype and device and equally many.
    """
    results: list[Tensor | None] = [None] * len(checked) if outs is None else list(outs)
    groups: dict[tuple[torch.device, torch.dtype, torch.dtype, int], Sequence[int]] = {}
    dense: list[Sequence[Tensor]] = []
    if are_alike:
        dense, first = list(checked), checked[0][0]
        out_dtype = first.dtype if outs is None else outs[0].dtype
        groups[first.device, first.dtype, out_dtype, len(checked[0])] = range(len(checked))
    for index, (present, out) in enumerate(() if are_alike else zip(checked, results, strict=True)):
        if out is None and present[0].layout is not torch.strided and all(t.is_sparse for t in present):
            results[index] = _sum_sparse(present, divisor)
            dense.append(present)
            continue
        parts = _all_dense(present)
        dense.append(parts)
        first = parts[0]
        key = (first.device, first.dtype, first.dtype if out is None else out.dtype, len(parts))
        cast("list[int]", groups.setdefault(key, [])).append(index)
    for (device, _, out_dtype, n), indices in groups.items():
        lists = [dense[i] for i in indices]
        nbytes = sum(map(Tensor.numel, [parts[0] for parts in lists])) * lists[0][0].itemsize
        name = backend
        if backend == "auto":
            name = _choose(lists[0], len(lists), nbytes, out_dtype, order, divisor is not None)
        _log(n, len(lists), nbytes, lists[0][0], order, name)
        if name == "torch":
            for i, parts in zip(indices, lists, strict=True):
                results[i] = reference.sum_checked(parts, results[i], order, divisor=divisor)
            continue
        for i, parts in zip(indices, lists, strict=True):
            if outs is None:
                results[i] = torch.empty_like(parts[0])
        targets = cast("list[Tensor]", [results[i] for i in indices])
        backends.explicit(name, device).sum_lists(lists, targets, order, divisor=divisor)
        if outs is not None:
            tell_autograd(targets)
    return cast("list[Tensor]", results)


def tell_autograd(changed: Sequence[Tensor]) -> None:
    """Compiled backends write to memory behind torch's back: a value saved for a derivative must not change unseen."""
    torch.autograd.graph.increment_version([out for out in changed if not out.is_inference()])


def _choose(
    contributions: Sequence[Tensor], num_tensors: int, nbytes: int, out_dtype: torch.dtype, order: str, divides: bool
) -> str:
    first = contributions[0]
    threads = torch.get_num_threads()
    problem = Problem(len(contributions), nbytes, first.dtype, first.device.type, num_tensors, threads)
    return backends.automatic(problem, out_dtype, order, divides)


@cache
def _logger() -> logging.Logger:
    return get_logger()


def _log(n: int, num_tensors: int, nbytes: int, first: Tensor, order: str, backend: str) -> None:
    if _logger().isEnabledFor(logging.DEBUG):
        problem = Problem(n, nbytes, first.dtype, first.device.type, num_tensors, torch.get_num_threads())
        _logger().debug(describe(problem, _METHODS[order], "all contributions are at hand", backend))


# ---- sparse COO tensors: entries are concatenated in order, then those at one place are added ----


def _sum_sparse(contributions: Sequence[Tensor], divisor: int | float | None = None) -> Tensor:
    """The coalesced sum of sparse COO tensors of one shape and dtype, with equally many sparse dimensions."""
    first = contributions[0]
    # The entries of a tensor that is not coalesced have no public access, and coalescing each first would
    # sort everything twice.
    indices = torch.cat([torch_internals.indices_of(t) for t in contributions], dim=1)
    values = torch.cat([torch_internals.values_of(t) for t in contributions])
    values = values.to(problems.accumulation_dtype(first.dtype))
    total = _make_sparse(indices, values, first.shape, is_coalesced=False).coalesce()
    sums = total.values()
    if divisor is not None:
        reference.divide_(sums, divisor)
    if sums.dtype == first.dtype:
        return total
    return _make_sparse(total.indices(), sums.to(first.dtype), first.shape, is_coalesced=True)


def _all_dense(contributions: Sequence[Tensor]) -> Sequence[Tensor]:
    """The contributions, the sparse ones of them made dense."""
    if all(t.layout is torch.strided for t in contributions):
        return contributions
    return [t if t.layout is torch.strided else _sum_sparse([t]).to_dense() for t in contributions]


def _make_sparse(indices: Tensor, values: Tensor, shape: torch.Size, *, is_coalesced: bool) -> Tensor:
    # The parts come from valid tensors: checking every index again would cost a pass (and a wait on a GPU).
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)
