"""The bytes of tensors."""

from __future__ import annotations

import torch


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, as one dimension of uint8; its own memory where it is contiguous.

    Example:
        >>> bytes_of(torch.tensor([1, 256], dtype=torch.int16))
        tensor([1, 0, 0, 1], dtype=torch.uint8)
    """
    value = tensor.detach()
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    flat = value if value.dim() == 1 else value.reshape(-1)
    flat = flat.contiguous()
    if flat.numel() == 1:  # with one element any stride counts as contiguous, and view refuses all but 1
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
