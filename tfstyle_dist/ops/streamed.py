"""Updates and copies of large tensors on the CPU, written past the caches: for values that nobody reads at once.

Ordinary stores read each line before they write it. The bits are those of torch, which does it where no compiler is
installed, and until the code is compiled: in the background, for a server must not wait for it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from tfstyle_dist.ops.backends import WarmUp
from tfstyle_dist.ops.dispatch import tell_autograd
from tfstyle_dist_kernels.cpu import cpu_update

# Smaller outputs stay in the caches, where they are found by whoever reads them next.
LARGE_BYTES: Final = 8 << 20
# What is saved for each byte of the output, measured on one core: 1.35 ms of 4.8 for an update of 64 MB, 0.76 ms of
# 3.15 for a copy.
UPDATE_SECONDS_PER_BYTE: Final = 0.020e-9
COPY_SECONDS_PER_BYTE: Final = 0.011e-9

_warm_up = WarmUp("cpu.cpu_sum", in_background=True)


def add(first: Tensor, second: Tensor, scale: float, out: Tensor) -> None:
    """``torch.add(first, second, alpha=scale, out=out)``, past the caches if ``out`` is large; without a gradient.

    Args:
        first: a tensor.
        second: another one; it is read with ``first``, element by element.
        scale: a number; an int for integers.
        out: a tensor of the result's shape. If it is ``first`` or ``second``, its lines are read anyway.
    """
    key = cpu_update.update_key(first.dtype) if _is_large(first, second, out) else None
    is_ready = key is not None and _is_ready(key, out.nbytes * UPDATE_SECONDS_PER_BYTE)
    if is_ready and cpu_update.update(first, second, scale, out):
        tell_autograd([out])
    elif scale == -1:
        torch.sub(first, second, out=out)
    else:
        torch.add(first, second, alpha=scale, out=out)


def copy_bytes(source: Tensor, out: Tensor) -> None:
    """``out.copy_(source)`` for flat tensors of bytes (uint8), past the caches if they are large."""
    is_ready = _is_large(source, source, out) and _is_ready(cpu_update.COPY, out.nbytes * COPY_SECONDS_PER_BYTE)
    if is_ready and cpu_update.copy(source, out):
        tell_autograd([out])
    else:
        out.copy_(source)


def _is_large(first: Tensor, second: Tensor, out: Tensor) -> bool:
    return (
        out.nbytes >= LARGE_BYTES
        and out.is_cpu
        and first.is_cpu
        and second.is_cpu
        and first.dtype == second.dtype == out.dtype
        and first.shape == second.shape == out.shape
        and out.data_ptr() not in (first.data_ptr(), second.data_ptr())
    )


def _is_ready(key: cpu_update.Key, gain: float) -> bool:
    return _warm_up.reason() is None and _warm_up.is_ready(key, gain)
