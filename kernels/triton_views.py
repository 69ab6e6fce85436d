"""Brings tensors of any strides into the form the Triton kernels take: flat, dense memory in one common layout."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tfstyle_dist_kernels import reference


def check_tensors(
    contributions: Sequence[Sequence[Tensor]], outs: Sequence[Tensor], divisor: int | float | None
) -> bool:
    """Checks shapes, dtypes and devices, and says whether all tensors are contiguous and can be taken as they are.

    Raises:
        ValueError: Something does not fit; the message names the tensor and the contribution.
    """
    first, first_out = contributions[0][0], outs[0]
    dtype, out_dtype, device = first.dtype, first_out.dtype, first.device
    fits = reference.find_problem([first], first_out, divisor=divisor) is None
    is_plain = not dtype.is_complex
    strided = torch.strided
    for row, out in zip(contributions, outs, strict=True):
        shape = out.shape
        fits = fits and out.dtype == out_dtype and out.device == device and out.layout == strided
        is_plain = is_plain and fits and out.is_contiguous() and not out.is_neg()
        for contribution in row:
            # One pass over what may be thousands of tensors: no message is built here.
            if (
                contribution.dtype != dtype
                or contribution.shape != shape
                or contribution.device != device
                or contribution.layout != strided
            ):
                fits = False
            elif not contribution.is_contiguous() or contribution.is_neg():
                is_plain = False
    if not fits:
        _raise_problem(contributions, outs, divisor)
    return is_plain


def _raise_problem(
    contributions: Sequence[Sequence[Tensor]], outs: Sequence[Tensor], divisor: int | float | None
) -> None:
    for tensor, (row, out) in enumerate(zip(contributions, outs, strict=True)):
        problem = reference.find_problem(row, out, divisor=divisor)
        for what, given in [("out", out), *((f"contribution {index}", given) for index, given in enumerate(row))]:
            if problem is None and given.layout != torch.strided:
                problem = f"{what} is sparse: make it dense first"
        if problem is not None:
            raise ValueError(f"tensor {tensor}: {problem}")
    first, first_out = contributions[0][0], outs[0]
    for tensor, (row, out) in enumerate(zip(contributions, outs, strict=True)):
        for what, found, expected in [
            ("contributions have dtype", row[0].dtype, first.dtype),
            ("out has dtype", out.dtype, first_out.dtype),
            ("contributions are on device", row[0].device, first.device),
        ]:
            if found != expected:
                raise ValueError(
                    f"tensor {tensor}: {what} {found} but those of tensor 0 {expected}: make one call for each"
                )
    raise AssertionError("the tensors do not fit, but no problem was found")


def make_flat(
    contributions: Sequence[Sequence[Tensor]], outs: Sequence[Tensor]
) -> tuple[list[list[Tensor]], list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Takes each tensor in the layout of its output, copying only what has another one.

    Returns:
        Contributions and outputs whose memory can be read and written as a flat range, element by element, and the
        pairs (output, temporary) to copy back after the sum.
    """
    flat_contributions: list[list[Tensor]] = []
    flat_outs: list[Tensor] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for row, out in zip(contributions, outs, strict=True):
        target = out
        if not is_dense(out) or out.is_conj() or out.is_neg():
            target = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            copies.append((out, target))
        flat_contributions.append([_to_real(_in_layout_of(target, contribution)) for contribution in row])
        flat_outs.append(_to_real(target))
    return flat_contributions, flat_outs, copies


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a range of memory without gaps and without sharing (row-major, channels last, ...)."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _in_layout_of(target: Tensor, contribution: Tensor) -> Tensor:
    if (
        (contribution.stride() == target.stride() or (contribution.is_contiguous() and target.is_contiguous()))
        and not contribution.is_conj()
        and not contribution.is_neg()
    ):
        return contribution
    copy = torch.empty_strided(target.shape, target.stride(), dtype=contribution.dtype, device=target.device)
    return copy.copy_(contribution)


def _to_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def find_overlaps(contributions: Sequence[Sequence[Tensor]], outs: Sequence[Tensor]) -> list[int]:
    """The tensors whose output overlaps one of their own contributions in part, which needs a temporary.

    An output that is exactly one of its own contributions is no overlap. All tensors are flat (see ``make_flat``).

    Raises:
        ValueError: An output shares memory with another output or with a contribution to another tensor. The result
            would depend on which part of the list is summed first.
    """
    ranges = sorted((*_byte_range(out), tensor) for tensor, out in enumerate(outs) if out.numel() > 0)
    for (_, end, tensor), (start, _, other) in pairwise(ranges):
        if start < end:
            raise ValueError(f"the outputs of tensors {tensor} and {other} share memory: give each its own")
    starts = [start for start, _, _ in ranges]
    overlapping: set[int] = set()
    for tensor, row in enumerate(contributions):
        for index, contribution in enumerate(row):
            start, end = _byte_range(contribution)
            # The outputs do not overlap, so from the last that starts before `end` backwards all that end late enough.
            position = bisect_right(starts, end - 1) - 1
            while end > start and position >= 0 and ranges[position][1] > start:
                out_start, out_end, other = ranges[position]
                if other != tensor:
                    raise ValueError(
                        f"the output of tensor {other} shares memory with contribution {index} to tensor {tensor}: "
                        "give it its own memory, or that of one of its own contributions"
                    )
                if (out_start, out_end) != (start, end) or contribution.dtype != outs[tensor].dtype:
                    overlapping.add(tensor)
                position -= 1
    return sorted(overlapping)


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()
