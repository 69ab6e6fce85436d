"""The bytes of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
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


class _Memory:
    """What numpy asks for the place of a tensor's bytes; an array of it keeps the tensor."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def __array_interface__(self) -> dict[str, Any]:
        place = (self._tensor.data_ptr(), False)
        return {"version": 3, "typestr": "|u1", "shape": (len(self._tensor),), "data": place}


def view_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor of the CPU that has elements, to be read at once; its own memory where contiguous.

    Who asks for ``tensor.numpy()`` takes ``resize_`` from the tensor for good, which observers of ranges use.

    Example:
        >>> list(view_of(torch.tensor([1, 256], dtype=torch.int16)))
        [1, 0, 0, 1]
    """
    return np.asarray(_Memory(bytes_of(tensor))).data
