"""A sparse tensor as dense ones, which can be sent, kept in files, and assembled again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals

_COORDINATES = "sparse_coo"
_COMPRESSED = {f"sparse_{name}": getattr(torch, f"sparse_{name}") for name in ("csr", "csc", "bsr", "bsc")}
_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its numbers, one for each element: neither sparse, nested nor quantized."""
    with torch_internals.DisableTorchFunctionSubclass():  # to look at a variable is not to read it
        return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether ``parts_of`` can take a tensor apart: COO, CSR, CSC, BSR and BSC."""
    with torch_internals.DisableTorchFunctionSubclass():
        return tensor.layout is torch.sparse_coo or tensor.layout in _COMPRESSED.values()


def make_dense(states: Iterable[dict[str, Any]]) -> None:
    """Puts dense tensors in the place of sparse ones: zeros that are written out change no sum, such as a momentum."""
    for state in states:
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and is_sparse(value):
                state[name] = value.to_dense()


def about(tensor: torch.Tensor) -> list[Any]:
    """What a sparse tensor is besides its parts, as JSON: its layout, its shape, and whether it is coalesced."""
    coordinates = tensor.layout is torch.sparse_coo
    return [
        str(tensor.layout).removeprefix("torch."),
        list(tensor.shape),
        tensor.is_coalesced() if coordinates else True,
    ]


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Its indices and values, without a graph; they share its memory, and may lie in it in any order."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [torch_internals.indices_of(tensor), torch_internals.values_of(tensor)]
    if tensor.layout in _BY_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def count(description: Sequence[Any]) -> int:
    """How many parts the tensor of a description has."""
    return 2 if description[0] == _COORDINATES else 3


def check(description: Any, parts: int) -> None:
    """Finds out whether ``assemble`` knows a description.

    Raises:
        ValueError: ``about`` makes nothing like that, or not with as many parts.
    """
    layout, shape, coalesced = description
    known = layout in _COMPRESSED or layout == _COORDINATES
    sizes = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    if not known or not sizes or type(coalesced) is not bool or parts != count(description):
        raise ValueError(f"{str(description)[:80]} with {parts} parts is no sparse tensor")


def assemble(description: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sparse tensor that was taken apart.

    Args:
        description: as ``about`` gave it.
        parts: as ``parts_of`` gave them.

    Raises:
        ValueError: see ``check``.
        RuntimeError: the parts do not fit each other.
    """
    check(description, len(parts))
    layout, shape, coalesced = description
    with torch.no_grad():
        if layout == _COORDINATES:
            indices, values = parts
            made = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
            return torch_internals.sparse_of(indices, values, shape, True) if coalesced else made
        compressed, plain, values = parts
        return torch.sparse_compressed_tensor(
            compressed, plain, values, shape, layout=_COMPRESSED[layout], check_invariants=True
        )


def fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a tensor another one's elements, in place; both have one shape and layout."""
    with torch.no_grad():
        if tensor.layout in _COMPRESSED.values() and _sizes(tensor) != _sizes(value):
            tensor.resize_as_sparse_(value)
        tensor.copy_(value)


def _sizes(tensor: torch.Tensor) -> list[torch.Size]:
    return [part.shape for part in parts_of(tensor)]
