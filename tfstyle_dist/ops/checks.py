"""What can be summed: the checks of the dispatcher, whose messages name the contribution at fault."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Final, cast

import torch
from torch import Tensor

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist_kernels import problems

_PLAIN: Final = {Tensor, torch.nn.Parameter}
_shape, _layout, _dtype, _device = map(operator.attrgetter, ("shape", "layout", "dtype", "device"))


def check(contributions: Sequence[Tensor | None], out: Tensor | None, divisor: int | float | None) -> list[Tensor]:
    """The contributions that are not ``None``, if they can be summed; errors name the original index.

    Raises:
        InvalidArgumentError: they cannot be summed, or ``out`` or ``divisor`` do not fit.
        TypeError: a contribution is not a tensor.
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
    problem = problems.find_problem(present, out, divisor=divisor, indices=indices)
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
) -> tuple[list[Sequence[Tensor]], bool]:
    """The contributions to each tensor of the list, checked as by ``check``.

    Returns:
        The contributions, and whether all of them are known to be dense tensors of one dtype on one device, and the
        outputs too.

    Raises:
        InvalidArgumentError: lists differ in length, or the contributions to a tensor cannot be summed.
        TypeError: a contribution is not a tensor.
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
    columns = list(zip(*contribution_lists, strict=True))
    targets: Sequence[Tensor | None] = [None] * num_tensors if outs is None else outs
    checked: list[Sequence[Tensor]] = []
    for t, (column, out) in enumerate(zip(columns, targets, strict=True)):
        checked.append(check_column(t, column, out, divisor))
        # torch.compile would have to follow each step of the short cut.
        may_skip = t == 0 and num_tensors > 1 and not torch.compiler.is_compiling() and _are_alike(contribution_lists)
        if may_skip and (outs is None or _are_outputs(outs, contribution_lists[0])):
            return cast("list[Sequence[Tensor]]", columns), True
    return checked, False


def _are_alike(lists: Sequence[Sequence[Tensor | None]]) -> bool:
    """Whether all are dense, of one dtype and device, and of the same shapes in each list.

    Each test runs over all tensors at once: with hundreds of them, one after the other takes longer than the sum.
    """
    tensors = list(chain.from_iterable(lists))
    if not set(map(type, tensors)) <= _PLAIN:
        return False
    shapes = list(map(_shape, lists[0]))
    return (
        set(map(_layout, tensors)) == {torch.strided}
        and len(set(map(_dtype, tensors))) == 1
        and len(set(map(_device, tensors))) == 1
        and all(all(map(operator.eq, shapes, map(_shape, other))) for other in lists[1:])
    )


def _are_outputs(outs: Sequence[Tensor], first: Sequence[Tensor | None]) -> bool:
    """Whether outputs, the first of which fits, are like it and of these shapes."""
    return (
        set(map(type, outs)) <= _PLAIN
        and set(map(_layout, outs)) == {torch.strided}
        and len(set(map(_dtype, outs))) == 1
        and len(set(map(_device, outs))) == 1
        and all(map(operator.eq, map(_shape, outs), map(_shape, first)))
    )


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
