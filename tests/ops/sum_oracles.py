"""Sums written plainly, and TensorFlow's recorded ones: what the backends are compared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "add_n_golden.json").read_text())["cases"]
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.int32, torch.int64, torch.uint8]
HALF = [torch.float16, torch.bfloat16]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def make(n: int, shape: int | Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """N tensors whose sum depends on the order: the magnitudes differ widely."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape,) if isinstance(shape, int) else shape
    if not dtype.is_floating_point and not dtype.is_complex:
        top = min(torch.iinfo(dtype).max, 2**62)
        return [torch.randint(0, top, size, generator=generator, dtype=dtype) for _ in range(n)]
    return [torch.randn(size, generator=generator).to(dtype) * 2.0 ** (j % 7 - 3) for j in range(n)]


def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def chain_oracle(xs: Sequence[Tensor]) -> Tensor:
    return reduce(add, xs)


def add_n_oracle(xs: Sequence[Tensor]) -> Tensor:
    head = {0: 8, 1: 9}.get(len(xs) % 8, len(xs) % 8)
    total = chain_oracle(xs[:head])
    for start in range(head, len(xs), 8):
        total = total + chain_oracle(xs[start : start + 8])
    return total


def tree_oracle(xs: Sequence[Tensor]) -> Tensor:
    if len(xs) == 1:
        return xs[0]
    half = 1
    while half * 2 < len(xs):
        half *= 2
    return tree_oracle(xs[:half]) + tree_oracle(xs[half:])


ORDERS = {"add_n": add_n_oracle, "tree": tree_oracle, "accumulate_n": chain_oracle}


def recorded_contribution(j: int, size: int) -> Tensor:
    # The formula of the recording: exact integers, float64, rounded once to float32.
    i = np.arange(size, dtype=np.uint64)
    h = (i * np.uint64(2654435761) + np.uint64(j * 3928691 + 12345)) % np.uint64(2**32)
    return torch.from_numpy(((h.astype(np.float64) / 2.0**32 - 0.5) * 2.0 ** (j % 7 - 3)).astype(np.float32))
