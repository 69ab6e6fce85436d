"""The types of numbers that every part of the package can add and send."""

from __future__ import annotations

import torch

COMMON = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
"""Their order is part of the protocol of parameter servers: new ones come at the end."""
