"""What can be summed: the checks of the dispatcher, whose messages name the contribution at fault."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist_kernels import reference


def check(contributions: Sequence[Tensor | None], out: Tensor | None, divisor: int | float | None) -> list[Tensor]:
    """The contributions that are not ``None``, if they can be summed; errors name the original index.

    Raises:
        InvalidArgumentError: They cannot be summed, or ``out`` or ``divisor`` do not fit.
        TypeError: A contribution is not a tensor.
    """
    given: object = contributions
    if isinstance(given, Tensor):  # it would iterate over its rows
        raise TypeError("contributions is one tensor, not a sequence of tensors: write [tensor]")
    present = [contribution for contribution in contributions if contribution is not None]
    indices: Sequence[int] = range(len(present))
    if len(present) < len(contributions):
        indices = [index for index, contribution in enumerate(contributions) if contribution is not None]
    num_sparse = 0
    for index, contribution in zip(indices, present, strict=True):
        if not isinstance(contribution, Tensor):
            raise TypeError(f"contribution {index} is a {type(contribution).__name__}, not a tensor")
        if contribution.layout is not torch.strided:
            num_sparse += 1
            if contribution.layout != torch.sparse_coo:
                raise InvalidArgumentError(
                    f"contribution {index} has layout {contribution.layout}: make it dense or sparse COO"
                )
    if not present:
        raise InvalidArgumentError(
            f"all {len(contributions)} contributions are None: at least one must be a tensor"
            if contributions
            else "there is nothing to sum: give at least one contribution"
        )
    problem = reference.find_problem(present, out, divisor=divisor, indices=indices)
    if problem is None and out is not None and out.layout is not torch.strided:
        problem = f"out has layout {out.layout} but must be dense: leave it out to get a sparse result"
    if problem is None and num_sparse == len(present):
        problem = _find_sparse_problem(present, indices)
    if problem is not None:
        raise InvalidArgumentError(problem)
    return present


def check_lists(
    contribution_lists: Sequence[Sequence[Tensor | None]],
    outs: Sequence[Tensor] | None,
    divisor: int | float | None,
) -> list[list[Tensor]]:
    """The contributions to each tensor of the list, checked as by ``check``.

    Raises:
        InvalidArgumentError: Lists differ in length, or the contributions to a tensor cannot be summed.
        TypeError: A contribution is not a tensor.
    """
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
    columns = zip(*contribution_lists, strict=True)
    return [check_column(t, column, None if outs is None else outs[t], divisor) for t, column in enumerate(columns)]


def check_column(
    index: int, contributions: Sequence[Tensor | None], out: Tensor | None, divisor: int | float | None
) -> list[Tensor]:
    """As ``check``, for tensor ``index`` of a list, which the errors name."""
    try:
        return check(contributions, out, divisor)
    except (InvalidArgumentError, TypeError) as error:
        raise type(error)(f"tensor {index} of the list: {error}") from error


def _find_sparse_problem(contributions: Sequence[Tensor], indices: Sequence[int]) -> str | None:
    expected = contributions[0].sparse_dim()
    for index, contribution in zip(indices, contributions, strict=True):
        if contribution.sparse_dim() != expected:
            return (
                f"contribution {index} has {contribution.sparse_dim()} sparse dimensions but "
                f"contribution {indices[0]} has {expected}"
            )
    return None
