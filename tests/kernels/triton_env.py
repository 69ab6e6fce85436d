"""Where the Triton tests run, and what they share: on a CUDA device if there is one, else interpreted on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tfstyle_dist_kernels.triton import triton_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def _interpreter_without_cuda() -> Iterator[None]:
    """Triton decides at the import of a kernel whether it is compiled or interpreted."""
    if importlib.util.find_spec("triton") is not None:
        # First, and unchanged, so that nothing else in this process is interpreted.
        importlib.import_module("triton.language")
    name = "TRITON_INTERPRET"
    previous = os.environ.get(name)
    if DEVICE == "cpu":
        os.environ[name] = "1"
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = previous


# Test modules import this while they are collected: before any test, so that none can import the kernels earlier.
with _interpreter_without_cuda():
    REASON = triton_sum.unavailable()
IS_INTERPRETED = REASON is None and triton_sum.load_kernels().IS_INTERPRETED
needs_triton = pytest.mark.skipif(REASON is not None, reason=f"the Triton kernels cannot run: {REASON}")

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "add_n_golden.json").read_text())["cases"]


def recorded_contribution(j: int, size: int) -> Tensor:
    """The formula of the recording: exact integers, float64, rounded once to float32."""
    i = np.arange(size, dtype=np.uint64)
    h = (i * np.uint64(2654435761) + np.uint64(j * 3928691 + 12345)) % np.uint64(2**32)
    values = ((h.astype(np.float64) / 2.0**32 - 0.5) * 2.0 ** (j % 7 - 3)).astype(np.float32)
    return torch.from_numpy(values).to(DEVICE)


def make(n: int, shape: int | Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """N tensors whose sum depends on the order: the magnitudes differ widely."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    if not dtype.is_floating_point and not dtype.is_complex:
        top = min(torch.iinfo(dtype).max, 2**62)
        return [torch.randint(0, top, size, generator=generator, dtype=dtype).to(DEVICE) for _ in range(n)]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = [torch.randn(size, generator=generator, dtype=wide) * 2.0 ** (j % 7 - 3) for j in range(n)]
    return [value.to(dtype).to(DEVICE) for value in values]


def misaligned(tensor: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = memory[1:].view(tensor.shape)
    assert tensor.numel() == 0 or view.data_ptr() % 16 != 0 or tensor.element_size() == 16
    return view.copy_(tensor)


def poison(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An output whose old values would show: NaN, or 99 in integers."""
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 99
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_rounded(actual: Tensor, wide: Tensor) -> None:
    """``actual`` is ``wide`` rounded once. The interpreter cuts bfloat16 off where a device rounds to nearest."""
    if IS_INTERPRETED and actual.dtype == torch.bfloat16:
        cut_off = ((wide.contiguous().view(torch.int32) >> 16) << 16).view(torch.float32).bfloat16()
        assert bool(((actual == wide.bfloat16()) | (actual == cut_off)).all())
    else:
        assert_same(actual, wide.to(actual.dtype))
