"""The sum of N contributions to a tensor, or to each tensor of a list: ``aggregate`` and its forms."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import cast

import torch
from torch import Tensor

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.ops import backends
from tfstyle_dist.ops.checks import check, check_lists
from tfstyle_dist.ops.cost_model import ORDERS, Problem, choose_method, describe
from tfstyle_dist.ops.sparse import all_dense, sum_sparse
from tfstyle_dist_kernels import library, reference

_METHODS = {order: method for method, order in ORDERS.items()}


def aggregate(
    contributions: Sequence[Tensor | None],
    method: int | None = AggregationMethod.DEFAULT,
    *,
    out: Tensor | None = None,
    divisor: int | float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Sums the contributions to one tensor, and divides the sum if a divisor is given.

    No gradient is recorded. float16 and bfloat16 are summed and divided in float32 and rounded once. All backends
    give the same bits on the CPU.

    Args:
        contributions: Tensors of one shape, dtype and device. ``None`` entries are skipped. If all are sparse
            COO tensors, they are concatenated in order and coalesced, whatever the method, and the result is
            sparse (``torch.Tensor.coalesce`` adds the entries at one place in an order of its own); if some
            are dense, or ``out`` is, the sparse ones are made dense.
        method: A value of ``AggregationMethod``: the order of the summation. DEFAULT is ADD_N here, as all
            contributions are at hand.
        out: Where to write: a dense tensor of the contributions' shape and device, and of their dtype or, for
            float16 and bfloat16, of float32. It may share memory with any contribution. Without it the result
            is a new tensor, which shares memory with no contribution, also when there is only one.
        divisor: What to divide the sum by, in a true division; the number of values for a mean.
        backend: ``"torch"``; ``"numba"``, compiled for the CPU; ``"triton"``, compiled for GPUs; or ``"auto"``, the
            fastest of them that is installed.

    Returns:
        ``out``, or the new tensor.

    Raises:
        InvalidArgumentError: A ``ValueError``: there is no contribution; contributions differ in shape, dtype
            or device (the message names the index); the dtype has no sum (bool); integers meet a divisor;
            ``out`` does not fit; or the backend is unknown or cannot be used here.
        TypeError: A contribution is not a tensor.
        ValueError: ``method`` is not a value of ``AggregationMethod``.

    Example:
        >>> aggregate([torch.tensor([1.0, 2.0]), None, torch.tensor([3.0, 4.0])], divisor=2)
        tensor([2., 3.])
    """
    order = ORDERS[AggregationMethod.validate(method)]
    present = check(contributions, out, divisor)
    backends.check_name(backend)
    if torch.compiler.is_compiling():
        return _traced(present, order, out, divisor, backend)
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _sum(present, order, out, divisor, backend)
    return _sum(present, order, out, divisor, backend)


def aggregate_into(contributions: Sequence[Tensor], out: Tensor, *, backend: str = "auto") -> None:
    """Writes the ADD_N sum of ``contributions`` into ``out``; the form in which groups of workers add.

    Args:
        contributions: tensors of one shape and dtype, at least one.
        out: of the same shape; may be none of the contributions.
        backend: As for ``aggregate``.

    Raises:
        InvalidArgumentError: As for ``aggregate``.
    """
    aggregate(contributions, AggregationMethod.ADD_N, out=out, backend=backend)


def aggregate_list(
    contribution_lists: Sequence[Sequence[Tensor | None]],
    method: int | None = AggregationMethod.DEFAULT,
    *,
    outs: Sequence[Tensor] | None = None,
    divisor: int | float | None = None,
    backend: str = "auto",
) -> list[Tensor]:
    """Sums a list of tensors over the replicas: ``aggregate`` for each position of the list.

    Everything is checked before anything is written. Tensors of one device, dtype and number of contributions are
    summed by one call of the backend.

    Args:
        contribution_lists: ``contribution_lists[r]`` is replica r's list; all lists are equally long.
        method: A value of ``AggregationMethod``: the order of the summation.
        outs: Where to write, one tensor for each of the list. ``outs[t]`` may share memory with the
            contributions to tensor ``t``, not with those to other tensors.
        divisor: What to divide the sums by, in a true division.
        backend: As for ``aggregate``.

    Returns:
        One tensor for each of the list: ``outs[t]``, or a new one.

    Raises:
        InvalidArgumentError: A ``ValueError``: there is no list, the lists or ``outs`` differ in length, or
            ``aggregate`` refuses the contributions to a tensor (the message names the tensor and the
            replica) or the backend.
        TypeError: A contribution is not a tensor.
        ValueError: ``method`` is not a value of ``AggregationMethod``.

    Example:
        >>> replicas = [[torch.tensor(1.0), torch.tensor([2.0])], [torch.tensor(3.0), torch.tensor([4.0])]]
        >>> aggregate_list(replicas)
        [tensor(4.), tensor([6.])]
    """
    order = ORDERS[AggregationMethod.validate(method)]
    checked = check_lists(contribution_lists, outs, divisor)
    backends.check_name(backend)
    if torch.compiler.is_compiling():
        return _traced_list(checked, order, outs, divisor, backend)
    with torch.no_grad():
        return _sum_list(checked, order, outs, divisor, backend)


def explain(
    n: int,
    nbytes: int,
    dtype: torch.dtype,
    method: int | None = None,
    *,
    device: str = "cpu",
    num_tensors: int = 1,
    backend: str = "auto",
    at_hand: bool = True,
    memory_allowance: int | None = None,
    hosts: int = 1,
) -> str:
    """Says how N dense contributions would be summed, why, and the bytes and the time in the model.

    Args:
        n: The number of contributions.
        nbytes: The bytes of one contribution, over all tensors of the list.
        dtype: The dtype of the contributions.
        method: A value of ``AggregationMethod``; ``None``: DEFAULT, for which the model chooses.
        device: The type of the device, such as ``"cuda"``.
        num_tensors: How many tensors the list has.
        backend: As for ``aggregate``; for ``"auto"``, the one that would be taken once it is loaded.
        at_hand: Whether all contributions are there at once; otherwise they come one by one.
        memory_allowance: How many bytes of contributions may be kept until the last comes; ``None``: any number.
        hosts: How many hosts hold the contributions.

    Returns:
        One line of text.

    Raises:
        InvalidArgumentError: ``n``, ``num_tensors`` or ``hosts`` is below 1, ``nbytes`` below 0, or the backend is
            unknown or cannot be used here.
        ValueError: ``method`` is not a value of ``AggregationMethod``.

    Example:
        >>> explain(8, 64 << 20, torch.float32, backend="torch").split(":")[0]
        'ADD_N in torch on cpu, as all contributions are at hand'
    """
    chosen = AggregationMethod.validate(method)
    backends.check_name(backend)
    if n < 1 or nbytes < 0 or num_tensors < 1 or hosts < 1:
        raise InvalidArgumentError(
            f"explain needs n, num_tensors and hosts >= 1 and nbytes >= 0, got n={n}, num_tensors={num_tensors}, "
            f"hosts={hosts} and nbytes={nbytes}"
        )
    problem = Problem(
        n,
        nbytes,
        dtype,
        torch.device(device).type,
        num_tensors,
        torch.get_num_threads(),
        at_hand=at_hand,
        memory_allowance=memory_allowance,
        hosts=hosts,
    )
    why = "asked for"
    if method is None:
        chosen, why = choose_method(problem)
    if backend == "auto":
        backend = backends.fastest(problem)
    else:
        backends.explicit(backend, torch.device(device))
    return describe(problem, chosen, why, backend)


def _sum(
    present: Sequence[Tensor], order: str, out: Tensor | None, divisor: int | float | None, backend: str
) -> Tensor:
    first = present[0]
    if first.layout is not torch.strided and out is None and all(t.is_sparse for t in present):
        return sum_sparse(present, divisor)
    dense = all_dense(present)
    first = dense[0]
    nbytes = first.nbytes
    if backend == "auto":
        if nbytes * len(dense) < backends.SMALL_BYTES and len(dense) < backends.SMALL_COUNT and first.is_cpu:
            backend = "torch"
        else:
            backend = _choose(dense, 1, nbytes, first.dtype if out is None else out.dtype)
    _log(len(dense), 1, nbytes, first, order, backend)
    if backend == "torch":
        return reference.sum_checked(dense, out, order, divisor=divisor)
    target = torch.empty_like(first) if out is None else out
    backends.explicit(backend, first.device).sum_lists([dense], [target], order, divisor=divisor)
    return target


def _sum_list(
    checked: Sequence[Sequence[Tensor]],
    order: str,
    outs: Sequence[Tensor] | None,
    divisor: int | float | None,
    backend: str,
) -> list[Tensor]:
    results: list[Tensor | None] = [None] * len(checked)
    groups: dict[tuple[torch.device, torch.dtype, torch.dtype, int], list[int]] = defaultdict(list)
    dense: list[Sequence[Tensor]] = []
    for index, present in enumerate(checked):
        out = None if outs is None else outs[index]
        if out is None and present[0].layout is not torch.strided and all(t.is_sparse for t in present):
            results[index] = sum_sparse(present, divisor)
            dense.append(present)
            continue
        parts = all_dense(present)
        dense.append(parts)
        first = parts[0]
        results[index] = torch.empty_like(first) if out is None else out
        groups[first.device, first.dtype, first.dtype if out is None else out.dtype, len(parts)].append(index)
    done = cast("list[Tensor]", results)
    for (device, _, out_dtype, n), indices in groups.items():
        lists, targets = [dense[i] for i in indices], [done[i] for i in indices]
        nbytes = sum(parts[0].nbytes for parts in lists)
        name = _choose(lists[0], len(lists), nbytes, out_dtype) if backend == "auto" else backend
        _log(n, len(lists), nbytes, lists[0][0], order, name)
        backends.explicit(name, device).sum_lists(lists, targets, order, divisor=divisor)
    return done


def _choose(contributions: Sequence[Tensor], num_tensors: int, nbytes: int, out_dtype: torch.dtype) -> str:
    first = contributions[0]
    threads = torch.get_num_threads()
    problem = Problem(len(contributions), nbytes, first.dtype, first.device.type, num_tensors, threads)
    return backends.automatic(problem, out_dtype)


@cache
def _logger() -> logging.Logger:
    return get_logger()


def _log(n: int, num_tensors: int, nbytes: int, first: Tensor, order: str, backend: str) -> None:
    if _logger().isEnabledFor(logging.DEBUG):
        problem = Problem(n, nbytes, first.dtype, first.device.type, num_tensors, torch.get_num_threads())
        _logger().debug(describe(problem, _METHODS[order], "all contributions are at hand", backend))


def _traced(present: list[Tensor], order: str, out: Tensor | None, divisor: int | float | None, backend: str) -> Tensor:
    number = None if divisor is None else float(divisor)
    present = [t.detach() for t in present]
    if out is None:
        return cast(Tensor, torch.ops.tfstyle_dist.aggregate(present, order, number, backend))
    torch.ops.tfstyle_dist.aggregate_into(present, out.detach(), order, number, backend)
    return out


def _traced_list(
    checked: list[list[Tensor]],
    order: str,
    outs: Sequence[Tensor] | None,
    divisor: int | float | None,
    backend: str,
) -> list[Tensor]:
    if outs is not None or len({len(present) for present in checked}) != 1:
        targets: Sequence[Tensor | None] = [None] * len(checked) if outs is None else outs
        return [_traced(p, order, out, divisor, backend) for p, out in zip(checked, targets, strict=True)]
    flat = [t.detach() for present in checked for t in present]
    number = None if divisor is None else float(divisor)
    return list(torch.ops.tfstyle_dist.aggregate_list(flat, len(checked[0]), order, number, backend))


def _run_new(contributions: Sequence[Tensor], order: str, divisor: float | None, backend: str) -> Tensor:
    return _sum(contributions, order, None, divisor, backend)


def _run_into(contributions: Sequence[Tensor], out: Tensor, order: str, divisor: float | None, backend: str) -> None:
    _sum(contributions, order, out, divisor, backend)


def _run_lists(
    contributions: Sequence[Tensor], n: int, order: str, divisor: float | None, backend: str
) -> list[Tensor]:
    lists = [contributions[start : start + n] for start in range(0, len(contributions), n)]
    return _sum_list(lists, order, None, divisor, backend)


library.register(_run_new, _run_into, _run_lists)
