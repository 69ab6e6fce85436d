"""One sum over N contributions to a tensor: checks, sparse contributions, and the choice of the method."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist_kernels import reference


class _Sum(Protocol):
    def __call__(
        self,
        contributions: Sequence[Tensor],
        out: Tensor | None = None,
        *,
        divisor: int | float | None = None,
    ) -> Tensor: ...


_SUMS: Final[dict[int, _Sum]] = {
    AggregationMethod.ADD_N: reference.add_n,
    AggregationMethod.EXPERIMENTAL_TREE: reference.tree,
    AggregationMethod.EXPERIMENTAL_ACCUMULATE_N: reference.accumulate_n,
}
_ORDERS: Final[dict[int, str]] = {
    AggregationMethod.ADD_N: "ADD_N (TensorFlow's eager order; DEFAULT means this)",
    AggregationMethod.EXPERIMENTAL_TREE: "EXPERIMENTAL_TREE (pairwise, split at a power of two)",
    AggregationMethod.EXPERIMENTAL_ACCUMULATE_N: "EXPERIMENTAL_ACCUMULATE_N (one after the other)",
}


@torch.no_grad()
def aggregate(
    contributions: Sequence[Tensor | None],
    method: int | None = AggregationMethod.DEFAULT,
    *,
    out: Tensor | None = None,
    divisor: int | float | None = None,
) -> Tensor:
    """Sums the contributions to one tensor, and divides the sum if a divisor is given.

    No gradient is recorded. float16 and bfloat16 are summed and divided in float32 and rounded once.

    Args:
        contributions: Tensors of one shape, dtype and device. ``None`` entries are skipped. If all are sparse
            COO tensors, they are concatenated in order and coalesced, whatever the method, and the result is
            sparse (``torch.Tensor.coalesce`` adds the entries at one place in an order of its own); if some
            are dense, or ``out`` is, the sparse ones are made dense.
        method: A value of ``AggregationMethod``: the order of the summation.
        out: Where to write: a dense tensor of the contributions' shape and device, and of their dtype or, for
            float16 and bfloat16, of float32. It may share memory with any contribution. Without it the result
            is a new tensor, which shares memory with no contribution, also when there is only one.
        divisor: What to divide the sum by, in a true division; the number of values for a mean.

    Returns:
        ``out``, or the new tensor.

    Raises:
        InvalidArgumentError: A ``ValueError``: there is no contribution; contributions differ in shape, dtype
            or device (the message names the index); the dtype has no sum (bool); integers meet a divisor; or
            ``out`` does not fit.
        TypeError: A contribution is not a tensor.
        ValueError: ``method`` is not a value of ``AggregationMethod``.

    Example:
        >>> aggregate([torch.tensor([1.0, 2.0]), None, torch.tensor([3.0, 4.0])], divisor=2)
        tensor([2., 3.])
    """
    chosen = AggregationMethod.validate(method)
    return _sum(_check(contributions, out, divisor), chosen, out, divisor)


@torch.no_grad()
def aggregate_into(contributions: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Writes the ADD_N sum of ``contributions`` into ``out``; the form in which groups of workers add.

    Args:
        contributions: tensors of one shape and dtype, at least one.
        out: of the same shape; may be none of the contributions.
    """
    aggregate(contributions, AggregationMethod.ADD_N, out=out)


def aggregate_list(
    contribution_lists: Sequence[Sequence[Tensor | None]],
    method: int | None = AggregationMethod.DEFAULT,
    *,
    outs: Sequence[Tensor] | None = None,
    divisor: int | float | None = None,
) -> list[Tensor]:
    """Sums a list of tensors over the replicas: ``aggregate`` for each position of the list.

    Everything is checked before anything is written.

    Args:
        contribution_lists: ``contribution_lists[r]`` is replica r's list; all lists are equally long.
        method: A value of ``AggregationMethod``: the order of the summation.
        outs: Where to write, one tensor for each of the list. ``outs[t]`` may share memory with the
            contributions to tensor ``t``, not with those to other tensors.
        divisor: What to divide the sums by, in a true division.

    Returns:
        One tensor for each of the list: ``outs[t]``, or a new one.

    Raises:
        InvalidArgumentError: A ``ValueError``: there is no list, the lists or ``outs`` differ in length, or
            ``aggregate`` refuses the contributions to a tensor (the message names the tensor and the
            replica).
        TypeError: A contribution is not a tensor.
        ValueError: ``method`` is not a value of ``AggregationMethod``.

    Example:
        >>> replicas = [[torch.tensor(1.0), torch.tensor([2.0])], [torch.tensor(3.0), torch.tensor([4.0])]]
        >>> aggregate_list(replicas)
        [tensor(4.), tensor([6.])]
    """
    chosen = AggregationMethod.validate(method)
    if not contribution_lists:
        raise InvalidArgumentError("there is nothing to sum: give the list of at least one replica")
    num_tensors = len(contribution_lists[0])
    for replica, tensors in enumerate(contribution_lists):
        if len(tensors) != num_tensors:
            raise InvalidArgumentError(
                f"replica {replica} gives {len(tensors)} tensors but replica 0 gives {num_tensors}"
            )
    if outs is not None and len(outs) != num_tensors:
        raise InvalidArgumentError(f"outs has {len(outs)} tensors but every replica gives {num_tensors}")
    targets: Sequence[Tensor | None] = [None] * num_tensors if outs is None else outs
    by_tensor = list(zip(*contribution_lists, strict=True))
    checked = []
    for index, (contributions, out) in enumerate(zip(by_tensor, targets, strict=True)):
        try:
            checked.append(_check(contributions, out, divisor))
        except (InvalidArgumentError, TypeError) as error:
            raise type(error)(f"tensor {index} of the list: {error}") from error
    return [_sum(tensors, chosen, out, divisor) for tensors, out in zip(checked, targets, strict=True)]


def explain(n: int, nbytes: int, dtype: torch.dtype, method: int | None = AggregationMethod.DEFAULT) -> str:
    """Says how N dense contributions would be summed on the CPU, why, and how many bytes move in the model.

    Args:
        n: The number of contributions.
        nbytes: The bytes of one contribution.
        dtype: The dtype of the contributions.
        method: A value of ``AggregationMethod``.

    Returns:
        One line of text.

    Raises:
        InvalidArgumentError: ``n`` is below 1 or ``nbytes`` below 0.
        ValueError: ``method`` is not a value of ``AggregationMethod``.

    Example:
        >>> explain(8, 64 << 20, torch.float32).split(":")[0]
        "ADD_N (TensorFlow's eager order; DEFAULT means this) in pure torch"
    """
    chosen = AggregationMethod.validate(method)
    if n < 1 or nbytes < 0:
        raise InvalidArgumentError(f"explain needs n >= 1 and nbytes >= 0, got n={n} and nbytes={nbytes}")
    accumulator = reference.accumulation_dtype(dtype)
    if nbytes * accumulator.itemsize // dtype.itemsize > reference.BLOCKED_ABOVE_BYTES:
        how = f"in blocks of {reference.BLOCK_BYTES} bytes, so that the running total stays in the cache"
    else:
        how = f"in one piece, as a total of at most {reference.BLOCKED_ABOVE_BYTES} bytes stays in the cache"
    chain = f"; adds one by one would move 3(N-1)*S = {3 * (n - 1) * nbytes}" if n > 2 else ""
    return (
        f"{_ORDERS[chosen]} in pure torch: N = {n} contributions of S = {nbytes} bytes of {dtype}, "
        f"accumulated in {accumulator}, {how}; modelled traffic (N+1)*S = {(n + 1) * nbytes} bytes{chain}"
    )


def _check(contributions: Sequence[Tensor | None], out: Tensor | None, divisor: int | float | None) -> list[Tensor]:
    """The contributions that are not ``None``, if they can be summed; errors name the original index."""
    given: object = contributions
    if isinstance(given, Tensor):  # it would iterate over its rows
        raise TypeError("contributions is one tensor, not a sequence of tensors: write [tensor]")
    present: list[Tensor] = []
    indices: list[int] = []
    for index, contribution in enumerate(contributions):
        if contribution is None:
            continue
        if not isinstance(contribution, Tensor):
            raise TypeError(f"contribution {index} is a {type(contribution).__name__}, not a tensor")
        if contribution.layout not in (torch.strided, torch.sparse_coo):
            raise InvalidArgumentError(
                f"contribution {index} has layout {contribution.layout}: make it dense or sparse COO"
            )
        present.append(contribution)
        indices.append(index)
    if not present:
        raise InvalidArgumentError(
            f"all {len(contributions)} contributions are None: at least one must be a tensor"
            if contributions
            else "there is nothing to sum: give at least one contribution"
        )
    problem = reference.find_problem(present, out, divisor=divisor, indices=indices)
    if problem is None and out is not None and out.layout != torch.strided:
        problem = f"out has layout {out.layout} but must be dense: leave it out to get a sparse result"
    if problem is None and all(t.is_sparse for t in present):
        problem = _find_sparse_problem(present, indices)
    if problem is not None:
        raise InvalidArgumentError(problem)
    return present


def _find_sparse_problem(contributions: Sequence[Tensor], indices: Sequence[int]) -> str | None:
    expected = contributions[0].sparse_dim()
    for index, contribution in zip(indices, contributions, strict=True):
        if contribution.sparse_dim() != expected:
            return (
                f"contribution {index} has {contribution.sparse_dim()} sparse dimensions but "
                f"contribution {indices[0]} has {expected}"
            )
    return None


def _sum(present: list[Tensor], method: int, out: Tensor | None, divisor: int | float | None) -> Tensor:
    if out is None and all(t.is_sparse for t in present):
        return _sum_sparse(present, divisor)
    dense = [_sum_sparse([t]).to_dense() if t.is_sparse else t for t in present]
    logger = get_logger()
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(explain(len(dense), dense[0].nbytes, dense[0].dtype, method))
    return _SUMS[method](dense, out, divisor=divisor)


def _sum_sparse(contributions: Sequence[Tensor], divisor: int | float | None = None) -> Tensor:
    """Concatenates the entries in order, then adds those at the same place."""
    first = contributions[0]
    # The entries of a tensor that is not coalesced have no public access, and coalescing each first would
    # sort everything twice.
    indices = torch.cat([t._indices() for t in contributions], dim=1)
    values = torch.cat([t._values() for t in contributions])
    values = values.to(reference.accumulation_dtype(first.dtype))
    total = _make_sparse(indices, values, first.shape, is_coalesced=False).coalesce()
    sums = total.values()
    if divisor is not None:
        reference.divide_(sums, divisor)
    if sums.dtype == first.dtype:
        return total
    return _make_sparse(total.indices(), sums.to(first.dtype), first.shape, is_coalesced=True)


def _make_sparse(indices: Tensor, values: Tensor, shape: torch.Size, *, is_coalesced: bool) -> Tensor:
    # The parts come from valid tensors: checking every index again would cost a pass (and a wait on a GPU).
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced, check_invariants=False)
