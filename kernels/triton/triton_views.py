"""Brings tensors of any strides into the form the Triton kernels take: flat, dense memory in one common layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tfstyle_dist_kernels import problems


def check_tensors(
    contributions: Sequence[Sequence[Tensor]], outs: Sequence[Tensor], divisor: int | float | None
) -> bool:
    """Checks shapes, dtypes and devices, and says whether all tensors are contiguous and can be taken as they are.

    Raises:
        ValueError: something does not fit; the message names the tensor and the contribution.
    """
    first, first_out = contributions[0][0], outs[0]
    dtype, out_dtype, device = first.dtype, first_out.dtype, first.device
    fits = problems.find_problem([first], first_out, divisor=divisor) is None
    is_plain = not dtype.is_complex
    for row, out in zip(contributions, outs, strict=True):
        shape = out.shape
        fits = fits and out.dtype == out_dtype and out.device == device
        # Negative views of complex memory have gaps, so that only single elements look contiguous.
        is_plain = is_plain and out.is_contiguous() and (out.numel() > 1 or not any(t.is_neg() for t in (out, *row)))
        for contribution in row:
            # One pass over what may be thousands of tensors: no message is built here.
            if contribution.dtype != dtype or contribution.shape != shape or contribution.device != device:
                fits = False
            elif not contribution.is_contiguous():
                is_plain = False
    if not fits:
        _raise_problem(contributions, outs, divisor)
    return is_plain


def _raise_problem(
    contributions: Sequence[Sequence[Tensor]], outs: Sequence[Tensor], divisor: int | float | None
) -> None:
    for tensor, (row, out) in enumerate(zip(contributions, outs, strict=True)):
        problem = problems.find_problem(row, out, divisor=divisor)
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

    Raises:
        ValueError: a tensor is not strided.
    """
    flat_contributions: list[list[Tensor]] = []
    flat_outs: list[Tensor] = []
    copies: list[tuple[Tensor, Tensor]] = []
    for tensor, (row, out) in enumerate(zip(contributions, outs, strict=True)):
        for what, given in [("out", out), *((f"contribution {index}", given) for index, given in enumerate(row))]:
            if given.layout != torch.strided:
                raise ValueError(f"tensor {tensor}: {what} is sparse: make it dense first")
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
