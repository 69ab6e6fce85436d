"""Sums lists of tensors with Triton: one launch for a whole list, in the orders of ``reference``.

The sums have the bits of ``reference`` for every order, dtype and N; half precision is accumulated in float32 and
rounded once. Runs on CUDA tensors, and on CPU tensors where ``TRITON_INTERPRET=1`` was set before the first use
(slowly: for tests).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from tfstyle_dist_kernels import problems
from tfstyle_dist_kernels.triton import triton_plan
from tfstyle_dist_kernels.triton.triton_plan import Plan, build_plan, find_overlaps, find_plan, plan_key
from tfstyle_dist_kernels.triton.triton_views import check_tensors, make_flat

ORDERS: Final = ("add_n", "tree", "accumulate_n")
MIN_TRITON: Final = (3, 4)
# What Triton supports of CUDA devices.
MIN_CAPABILITY: Final = (8, 0)


@cache
def unavailable() -> str | None:
    """Says in one sentence why the Triton kernels cannot be used in this process, or ``None`` if they can.

    The answer is found once. It imports triton if that is installed.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton (the extra 'gpu' of tfstyle_dist)"
    try:
        kernels = load_kernels()
    except Exception as error:  # whatever a broken installation raises
        return f"triton cannot be imported: {error}"
    version: str = kernels.TRITON_VERSION
    if _release(version) < MIN_TRITON:
        return f"triton {version} is too old: {MIN_TRITON[0]}.{MIN_TRITON[1]} or later is needed"
    if kernels.IS_INTERPRETED:
        return _interpreter_fails(version)
    if not torch.cuda.is_available():
        return "there is no CUDA device (for tests on the CPU, set TRITON_INTERPRET=1 before the first use)"
    if torch.version.cuda is not None and torch.cuda.get_device_capability() < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name()} is too old for triton"
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _interpreter_fails(version: str) -> str | None:
    """Before 3.7 the interpreter makes numbers of arrays in a way that numpy 2.4 refuses."""
    import numpy

    if _release(version) < (3, 7) and _release(numpy.__version__) >= (2, 4):
        return f"the interpreter of triton {version} does not work with numpy {numpy.__version__}: install 'numpy<2.4'"
    return None


@cache
def load_kernels() -> ModuleType:
    """The module of the Triton kernels, which is imported at its first use."""
    from tfstyle_dist_kernels.triton import triton_kernels

    return triton_kernels


@torch.no_grad()
def sum_lists(
    contributions: Sequence[Sequence[Tensor]],
    outs: Sequence[Tensor],
    order: str,
    *,
    divisor: int | float | None = None,
    scale: Tensor | None = None,
) -> None:
    """Writes the sum of the contributions to every tensor of a list, in one launch.

    A launch reads each contribution and writes each output once. Tables of addresses are kept between calls by the
    addresses of all tensors (see ``triton_plan``), so a list whose tensors stay in place is cheapest. Autograd is not
    told that the outputs change.

    Args:
        contributions: ``contributions[t][i]`` is contribution i to tensor t: dense tensors of one dtype on one
            device, N >= 1 for every t, those of one t of one shape. Any strides; those that differ from their
            output's cost a copy.
        outs: where to write, one tensor for each t: the shape of its contributions, and their dtype or, for float16
            and bfloat16, float32. It may be one of its own contributions or overlap them, but share no memory with
            another tensor of the list.
        order: "add_n", "tree" or "accumulate_n" (see ``reference``).
        divisor: divides the sums before they are rounded, by a true division (the mean, with ``divisor=N``).
        scale: a floating point tensor of one element on the same device, read when the kernel runs; multiplies the
            sums before they are divided and rounded.

    Raises:
        RuntimeError: the kernels cannot be used (see ``unavailable``), the tensors are on another kind of device, or
            a CUDA graph captures the first call with these tensors.
        ValueError: the arguments do not fit together; the message names the tensor and the contribution.

    Example:
        >>> outs = [torch.empty_like(p) for p in parameters]  # doctest: +SKIP
        >>> sum_lists([[a, b] for a, b in zip(gradients_0, gradients_1)], outs, "add_n", divisor=2)  # doctest: +SKIP
    """
    num_contributions = check_lists(contributions, outs, order)
    if num_contributions == 0:
        return
    is_plain = check_tensors(contributions, outs, divisor)
    check_device(outs[0].device, scale)
    copies: list[tuple[Tensor, Tensor]] = []
    if not is_plain:
        contributions, outs, copies = make_flat(contributions, outs)
    constants = kernel_constants(order, num_contributions, contributions[0][0].dtype, outs[0].dtype)
    key = plan_key(_to_rows(contributions, outs), divisor, constants["BLOCK"])
    plan = find_plan(key)
    if plan is None:
        # A plan that is kept has passed this: the addresses decide what overlaps.
        overlapping = find_overlaps(key)
        if overlapping:
            outs = list(outs)
            for tensor in overlapping:
                temporary = torch.empty_like(outs[tensor])
                copies.append((outs[tensor], temporary))
                outs[tensor] = temporary
            key = plan_key(_to_rows(contributions, outs), divisor, constants["BLOCK"])
        plan = build_plan(key)
    constants |= {"DIVIDE": divisor is not None, "SCALE": scale is not None}
    launch("sum_kernel", plan, (num_contributions, len(outs)), scale, constants)
    for out, temporary in reversed(copies):
        out.copy_(temporary)


def check_lists(contributions: Sequence[Sequence[Tensor]], outs: Sequence[Tensor], order: str) -> int:
    """The number of contributions to each tensor; 0 if there is no tensor."""
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(f"the Triton kernels cannot be used: {reason}")
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}: give one of {', '.join(ORDERS)}")
    if len(contributions) != len(outs):
        raise ValueError(f"there are contributions to {len(contributions)} tensors but {len(outs)} outs")
    counts = [len(row) for row in contributions]
    for tensor, count in enumerate(counts):
        if count == 0:
            raise ValueError(f"tensor {tensor} has no contribution: leave it out of the list")
        if count != counts[0]:
            raise ValueError(
                f"tensor {tensor} has {count} contributions but tensor 0 has {counts[0]}: make one call for each number"
            )
    return counts[0] if counts else 0


def check_device(device: torch.device, scale: Tensor | None) -> None:
    """Raises unless the kernels can run on tensors of this device, with this scale."""
    expected = "cpu" if load_kernels().IS_INTERPRETED else "cuda"
    if device.type != expected:
        raise RuntimeError(f"the Triton kernels run on {expected} tensors here, not on those of {device}")
    if scale is None:
        return
    if scale.numel() != 1 or not scale.dtype.is_floating_point or scale.device != device:
        raise ValueError(
            f"scale must hold one floating point number on {device}, not {scale.numel()} of {scale.dtype} "
            f"on {scale.device}"
        )


def _to_rows(contributions: Sequence[Sequence[Tensor]], outs: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [*zip(*contributions, strict=True), outs]


def launch(
    kernel: str, plan: Plan, arguments: tuple[float, ...], scale: Tensor | None, constants: dict[str, Any]
) -> None:
    """Launches a kernel of ``triton_kernels`` with the tables of a plan; what has no element needs no launch."""
    num_chunks = len(plan.chunks)
    if num_chunks == 0:
        return
    device = plan.table.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        getattr(load_kernels(), kernel)[(num_chunks,)](
            plan.table,
            plan.chunks,
            plan.table if scale is None else scale,
            *arguments,
            **constants,
            **triton_plan.LAUNCH_OPTIONS,
        )


def kernel_constants(order: str, n: int, dtype: torch.dtype, out_dtype: torch.dtype) -> dict[str, Any]:
    """What the kernel is compiled for: few variants for all n, as groups of 8 contributions are summed in a loop."""
    accumulator = problems.accumulation_dtype(dtype)
    block = min(triton_plan.BLOCK_BYTES // dtype.itemsize, triton_plan.MAX_BLOCK_ELEMENTS)
    if order == "tree":
        # The last group has `head` members; a level doubles the number of groups.
        head = (n - 1) % 8 + 1
        levels = ((n + 7) // 8 - 1).bit_length()
    else:
        # The first group has `head` members, all others 8.
        head = (n - 2) % 8 + 2 if n > 1 else 1
        levels = int(n > head)
    return {
        "ORDER": order,
        "HEAD": head,
        "LEVELS": levels,
        "DTYPE": triton_dtype(dtype),
        "ACC": triton_dtype(accumulator),
        "OUT_DTYPE": triton_dtype(out_dtype),
        "BLOCK": block,
    }


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    return getattr(load_kernels().tl, str(dtype).removeprefix("torch."))  # Triton uses torch's names
