"""Batches that are no dense tensors: sparse ones and nested ones are cut along their first dimension too."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tfstyle_dist.core import sparse_parts

BATCHES_OF_ITS_OWN = (
    "give every replica batches of its own, as many for each: strategy.distribute_datasets_from_function(lambda "
    "context: DataLoader(part, batch_size=context.get_per_replica_batch_size(global_batch_size), ...)), where part has "
    "every context.num_input_pipelines-th sample from number context.input_pipeline_id on"
)
"""What to write where a batch cannot be cut, as of graphs, or of images with their boxes."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has strides and can be sliced."""
    return tensor.layout is torch.strided and not tensor.is_nested


def check_divisible(tensor: torch.Tensor) -> None:
    """Raises TypeError for a layout that cannot be cut along its first dimension."""
    if is_dense(tensor) or tensor.is_nested or tensor.layout is torch.sparse_coo:
        return
    raise TypeError(
        f"A batch of layout {tensor.layout} cannot be split over several replicas: its rows cannot be cut out. Return "
        "a dense tensor, a sparse COO tensor (tensor.to_sparse()) or a nested tensor from collate_fn."
    )


def sizes(tensor: torch.Tensor) -> tuple[int | None, ...]:
    """The sizes of all dimensions; ``None`` where the entries of a nested tensor differ."""
    return tuple(_size(tensor, axis) for axis in range(tensor.dim()))


def _size(tensor: torch.Tensor, axis: int) -> int | None:
    if not tensor.is_nested:
        return tensor.shape[axis]
    try:
        size = tensor.size(axis)
    except RuntimeError:
        return None
    return size if isinstance(size, int) else None  # a jagged tensor has a symbol there


def entry_sizes(tensor: torch.Tensor) -> list[tuple[int, ...]] | tuple[int, ...]:
    """The sizes of each entry of a nested tensor; of any other tensor its own sizes."""
    return [tuple(entry.shape) for entry in tensor.detach().unbind()] if tensor.is_nested else tuple(tensor.shape)


def cut(tensor: torch.Tensor, start: int, stop: int, offsets: dict[int, torch.Tensor]) -> torch.Tensor:
    """Examples ``start`` to ``stop`` of a tensor of any divisible layout; of a dense or jagged one as a view.

    Args:
        tensor: what is cut.
        start: the first example.
        stop: the one after the last.
        offsets: one dict for all tensors of a batch, filled here: jagged tensors with the same offsets, which can be
            added and multiplied, have the same ones afterwards.
    """
    if is_dense(tensor):
        return tensor[start:stop]
    if not tensor.is_nested:
        return tensor.narrow_copy(0, start, stop - start)
    jagged: Any = tensor
    if tensor.layout is torch.jagged and jagged.lengths() is None and _size(tensor, 1) is None:
        whole = jagged.offsets()
        own = offsets.setdefault(id(whole), whole[start : stop + 1] - whole[start])
        values = tensor.detach().values()[int(whole[start]) : int(whole[stop])]
        return torch.nested.nested_tensor_from_jagged(values, offsets=own)
    parts = list(tensor.detach().unbind()[start:stop])
    if parts or tensor.layout is torch.strided:
        return torch.nested.nested_tensor(parts, layout=tensor.layout, dtype=tensor.dtype, device=tensor.device)
    return empty_jagged(tensor.values()[:0])


def memory_of(tensor: Any) -> list[torch.Tensor]:
    """The dense tensors in which a tensor's values are."""
    if is_dense(tensor):
        return [tensor]
    if not tensor.is_nested:
        return sparse_parts.parts_of(tensor)
    if tensor.layout is torch.strided:
        return [tensor.values()]
    return [part for part in (tensor.values(), tensor.offsets(), tensor.lengths()) if part is not None]


def empty_jagged(no_rows: torch.Tensor) -> torch.Tensor:
    """A jagged tensor of no entries, whose rows would look like those that ``no_rows`` has none of."""
    return torch.nested.nested_tensor_from_jagged(no_rows, offsets=_no_offsets(no_rows.device))


@functools.cache
def _no_offsets(device: torch.device) -> torch.Tensor:
    """The same for all, so that empty tensors can be added and multiplied as those that have entries."""
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int64, device=device)


def describe(tensor: torch.Tensor) -> list[Any]:
    """The structure of a tensor that is not dense, in JSON's types; see ``from_description``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not tensor.is_nested:
        return ["sparse", dtype, list(tensor.shape[1:]), tensor.sparse_dim()]
    if tensor.layout is torch.strided:
        return ["nested", dtype]
    return ["jagged", dtype, list(tensor.values().shape[1:])]


def from_description(kind: str, dtype: torch.dtype, rest: list[Any]) -> torch.Tensor:
    """The batch of no examples that ``describe`` described.

    Args:
        kind: the first entry of the description.
        dtype: the second one.
        rest: the others.
    """
    if kind == "nested":
        return torch.nested.nested_tensor([], dtype=dtype)
    if kind == "jagged":
        return empty_jagged(torch.empty((0, *rest[0]), dtype=dtype))
    shape, sparse_dim = (0, *rest[0]), rest[1]
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64)
    values = torch.empty((0, *shape[sparse_dim:]), dtype=dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
