"""The sum of N contributions to a tensor, or to each tensor of a list: ``aggregate`` and its forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.ops import backends
from tfstyle_dist.ops.checks import check, check_column, check_lists
from tfstyle_dist.ops.cost_model import Problem, choose_method, describe, order_of
from tfstyle_dist.ops.dispatch import sum_list, sum_one
from tfstyle_dist_kernels import library


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
        contributions: tensors of one shape, dtype and device. ``None`` entries are skipped. If all are sparse
            COO tensors, they are concatenated in order and coalesced, whatever the method, and the result is
            sparse (``torch.Tensor.coalesce`` adds the entries at one place in an order of its own); if some
            are dense, or ``out`` is, the sparse ones are made dense.
        method: a value of ``AggregationMethod``: the order of the summation. DEFAULT is ADD_N here, as all
            contributions are at hand.
        out: where to write: a dense tensor of the contributions' shape and device, and of their dtype or, for
            float16 and bfloat16, of float32. It may share memory with any contribution. Without it the result
            is a new tensor, which shares memory with no contribution, also when there is only one.
        divisor: what to divide the sum by, in a true division; the number of values for a mean.
        backend: ``"torch"``; ``"llvm"``, compiled for the CPU; ``"triton"``, compiled for GPUs; or ``"auto"``, the
            fastest of them that is installed.

    Returns:
        ``out``, or the new tensor.

    Raises:
        InvalidArgumentError: a ``ValueError``: there is no contribution; contributions differ in shape, dtype
            or device (the message names the index); the dtype has no sum (bool); integers meet a divisor;
            ``out`` does not fit; or the backend is unknown or cannot be used here.
        TypeError: a contribution is not a tensor.
        ValueError: ``method`` is not a value of ``AggregationMethod``.

    Example:
        >>> aggregate([torch.tensor([1.0, 2.0]), None, torch.tensor([3.0, 4.0])], divisor=2)
        tensor([2., 3.])
    """
    order = order_of(method)
    present = check(contributions, out, divisor)
    backends.check_name(backend)
    if torch.compiler.is_compiling():
        return _traced_one(present, order, out, divisor, backend)
    if torch.is_grad_enabled():
        with torch.no_grad():
            return sum_one(present, order, out, divisor, backend)
    return sum_one(present, order, out, divisor, backend)


def aggregate_into(contributions: Sequence[Tensor], out: Tensor, *, backend: str = "auto") -> None:
    """Writes the ADD_N sum of ``contributions`` into ``out``; the form in which groups of workers add.

    Args:
        contributions: tensors of one shape and dtype, at least one.
        out: of the same shape; may be none of the contributions.
        backend: as for ``aggregate``.

    Raises:
        InvalidArgumentError: as for ``aggregate``.
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
        method: a value of ``AggregationMethod``: the order of the summation.
        outs: where to write, one tensor for each of the list. ``outs[t]`` may share memory with the
            contributions to tensor ``t``, not with those to other tensors.
        divisor: what to divide the sums by, in a true division.
        backend: as for ``aggregate``.

    Returns:
        One tensor for each of the list: ``outs[t]``, or a new one.

    Raises:
        InvalidArgumentError: a ``ValueError``: there is no list, the lists or ``outs`` differ in length, or
            ``aggregate`` refuses the contributions to a tensor (the message names the tensor and the
            replica) or the backend.
        TypeError: a contribution is not a tensor.
        ValueError: ``method`` is not a value of ``AggregationMethod``.

    Example:
        >>> replicas = [[torch.tensor(1.0), torch.tensor([2.0])], [torch.tensor(3.0), torch.tensor([4.0])]]
        >>> aggregate_list(replicas)
        [tensor(4.), tensor([6.])]
    """
    order = order_of(method)
    checked, are_alike = check_lists(contribution_lists, outs, divisor)
    backends.check_name(backend)
    if torch.compiler.is_compiling():
        return _traced_list(checked, order, outs, divisor, backend)
    with torch.no_grad():
        return sum_list(checked, order, outs, divisor, backend, are_alike=are_alike)


def aggregate_columns(
    columns: Sequence[Sequence[Tensor | None]],
    method: int | None = AggregationMethod.DEFAULT,
    *,
    backend: str = "auto",
) -> list[Tensor | None]:
    """``aggregate_list`` for contributions listed by tensor, some of which nobody may have contributed to.

    Args:
        columns: ``columns[t]`` holds the contributions to tensor ``t``, in order; numbers of them may differ.
        method: a value of ``AggregationMethod``: the order of the summation.
        backend: as for ``aggregate``.

    Returns:
        For each tensor the sum, a new tensor, or ``None`` if all its contributions are ``None``.

    Raises:
        InvalidArgumentError: ``aggregate`` refuses the contributions to a tensor, which the message names.
        TypeError: a contribution is not a tensor.
        ValueError: ``method`` is not a value of ``AggregationMethod``.

    Example:
        >>> aggregate_columns([[torch.tensor(1.0), torch.tensor(3.0)], [None, None]])
        [tensor(4.), None]
    """
    order = order_of(method)
    backends.check_name(backend)
    used = [t for t, column in enumerate(columns) if any(c is not None for c in column)]
    checked = [check_column(t, columns[t], None, None) for t in used]
    results: list[Tensor | None] = [None] * len(columns)
    if torch.compiler.is_compiling():
        sums = _traced_list(checked, order, None, None, backend) if checked else []
    else:
        with torch.no_grad():
            sums = sum_list(checked, order, None, None, backend)
    for t, total in zip(used, sums, strict=True):
        results[t] = total
    return results


def explain(
    n: int,
    nbytes: int,
    dtype: torch.dtype,
    method: int | None = AggregationMethod.DEFAULT,
    *,
    device: str = "cpu",
    num_tensors: int = 1,
    backend: str = "auto",
    at_hand: bool = True,
    memory_allowance: int | None = None,
) -> str:
    """Says how N dense contributions would be summed, why, and the bytes and the time in the model.

    Args:
        n: the number of contributions.
        nbytes: the bytes of one contribution, over all tensors of the list.
        dtype: the dtype of the contributions.
        method: a value of ``AggregationMethod``; for DEFAULT the model chooses.
        device: the type of the device, such as ``"cuda"``.
        num_tensors: how many tensors the list has.
        backend: as for ``aggregate``; for ``"auto"``, the one that would be taken once it is loaded.
        at_hand: whether all contributions are there at once; otherwise they come one by one.
        memory_allowance: how many bytes of contributions may be kept until the last comes; ``None``: any number.

    Returns:
        One line of text.

    Raises:
        InvalidArgumentError: ``n`` or ``num_tensors`` is below 1, ``nbytes`` below 0, or the backend is unknown or
            cannot be used here.
        ValueError: ``method`` is not a value of ``AggregationMethod``.

    Example:
        >>> explain(8, 64 << 20, torch.float32, backend="torch").split(":")[0]
        'ADD_N in torch on cpu, as all contributions are at hand'
    """
    chosen = AggregationMethod.validate(method)
    backends.check_name(backend)
    if n < 1 or nbytes < 0 or num_tensors < 1:
        raise InvalidArgumentError(
            f"explain needs n and num_tensors >= 1 and nbytes >= 0, got n={n}, num_tensors={num_tensors} and "
            f"nbytes={nbytes}"
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
    )
    why = "asked for"
    if AggregationMethod.is_default(method):
        chosen, why = choose_method(problem)
    if backend == "auto":
        backend = backends.fastest(problem)
    else:
        backends.explicit(backend, torch.device(device))
    return describe(problem, chosen, why, backend)


# ---- under torch.compile: single operators of the graph, which call the dispatcher when the graph runs ----


def _traced_one(
    present: Sequence[Tensor], order: str, out: Tensor | None, divisor: int | float | None, backend: str
) -> Tensor:
    """``sum_one`` as an operator of the graph that is being traced."""
    number = None if divisor is None else float(divisor)
    present = [t.detach() for t in present]
    if out is None:
        return cast(Tensor, torch.ops.tfstyle_dist.aggregate(present, order, number, backend))
    torch.ops.tfstyle_dist.aggregate_into(present, out.detach(), order, number, backend)
    return out


def _traced_list(
    checked: Sequence[Sequence[Tensor]],
    order: str,
    outs: Sequence[Tensor] | None,
    divisor: int | float | None,
    backend: str,
) -> list[Tensor]:
    """``sum_list`` as an operator of the graph that is being traced."""
    if outs is not None or len({len(present) for present in checked}) != 1:
        targets: Sequence[Tensor | None] = [None] * len(checked) if outs is None else outs
        return [_traced_one(p, order, out, divisor, backend) for p, out in zip(checked, targets, strict=True)]
    flat = [t.detach() for present in checked for t in present]
    number = None if divisor is None else float(divisor)
    return list(torch.ops.tfstyle_dist.aggregate_list(flat, len(checked[0]), order, number, backend))


def _run_new(contributions: Sequence[Tensor], order: str, divisor: float | None, backend: str) -> Tensor:
    return sum_one(contributions, order, None, divisor, backend)


def _run_into(contributions: Sequence[Tensor], out: Tensor, order: str, divisor: float | None, backend: str) -> None:
    sum_one(contributions, order, out, divisor, backend)


def _run_lists(
    contributions: Sequence[Tensor], n: int, order: str, divisor: float | None, backend: str
) -> list[Tensor]:
    lists = [contributions[start : start + n] for start in range(0, len(contributions), n)]
    return sum_list(lists, order, None, divisor, backend)


library.register(_run_new, _run_into, _run_lists)
