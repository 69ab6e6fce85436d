"""Updates and copies of tensors on the CPU that are written past the caches, with the bits of torch.

They are programs of ``cpu_kernel.py``, compiled by ``cpu_sum.prepare``.
"""

from __future__ import annotations

from functools import cache
from typing import Final, TypeAlias

import torch
from torch import Tensor

from tfstyle_dist_kernels.cpu import cpu_sum

Key: TypeAlias = tuple[torch.dtype, torch.dtype, int, str, bool]

COPY: Final[Key] = (torch.uint8, torch.uint8, 1, "add_n", False)


def update_key(dtype: torch.dtype) -> Key | None:
    """What ``cpu_sum.prepare`` takes for the update of tensors of a dtype; ``None``: there is no such kernel."""
    return (dtype, dtype, 2, "update", False) if dtype in (torch.float32, torch.float64) else None


def update(first: Tensor, second: Tensor, scale: float, out: Tensor) -> bool:
    """Writes ``first + scale * second`` to ``out``, with the bits of ``torch.add(first, second, alpha=scale)``.

    Autograd is not told that ``out`` changes.

    Args:
        first: a tensor on the CPU of a dtype with an ``update_key``.
        second: another one of its dtype and shape.
        scale: a number.
        out: where to write: like ``first``.

    Returns:
        Whether it was done; not where torch would round otherwise, or for tensors that are not row-major, overlap
        partly or are subclasses.

    Raises:
        RuntimeError: nothing can be compiled here.
    """
    key = update_key(first.dtype)
    if key is None or not cpu_sum.are_plain([first, second, out]):
        return False
    if scale not in (1, -1) and not _rounds_like_torch(first.dtype):
        return False
    return not cpu_sum.run(cpu_sum.prepare(*key), [[first, second]], [out], "update", scale, streamed_above_bytes=0)


def copy(source: Tensor, out: Tensor) -> bool:
    """Copies a tensor of bytes to another one of the same size.

    Returns:
        Whether it was done; not for tensors that are not row-major, overlap partly or are subclasses.

    Raises:
        RuntimeError: nothing can be compiled here.
    """
    if not cpu_sum.are_plain([source, out]):
        return False
    return not cpu_sum.run(cpu_sum.prepare(*COPY), [[source]], [out], "add_n", 0, streamed_above_bytes=0)


@cache
def _rounds_like_torch(dtype: torch.dtype) -> bool:
    """Whether torch rounds ``first + scale * second`` as the kernel does: once, in its vectors and after them."""
    from tfstyle_dist_kernels.cpu import cpu_llvm

    scale = 1 + torch.finfo(dtype).eps * 2 ** (11 if dtype == torch.float32 else 25)
    second = torch.full((67,), scale, dtype=dtype)
    rest = torch.add(-(second * second), second, alpha=scale)  # 0 after two roundings
    return bool((rest != 0).all()) if cpu_llvm.has_fused() else False
