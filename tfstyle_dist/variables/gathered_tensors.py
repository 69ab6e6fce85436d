"""Tensors of any shape from all replicas, as ``dist_sync_fn`` of torchmetrics gives them."""

from __future__ import annotations

import torch

from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.runtime.context import current_replica

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_MOST_DIMENSIONS = 8


def of_all_replicas(value: torch.Tensor, group: None = None) -> list[torch.Tensor]:
    """The tensors that all replicas have here, in replica order; called by each of them.

    Args:
        value: of any shape, which need not be that of the others.
        group: torchmetrics' name for a part of the processes; none.
    """
    replica = current_replica()
    assert replica is not None
    about = [_DTYPES.index(value.dtype), value.dim(), *value.shape]
    mine = torch.tensor([about + [0] * (_MOST_DIMENSIONS + 2 - len(about))], device=value.device)
    told = [(_DTYPES[row[0]], torch.Size(row[2 : 2 + row[1]])) for row in replica.all_gather(mine, axis=0).tolist()]
    sizes = [dtype.itemsize * shape.numel() for dtype, shape in told]
    parts = replica.all_gather(bytes_of(value), axis=0).split(sizes)
    # What a replica has that has seen nothing is empty and of some type: the others know which.
    known = next((dtype for dtype, shape in told if shape.numel()), value.dtype)
    found = [part.clone().view(dtype).reshape(shape) for part, (dtype, shape) in zip(parts, told, strict=True)]
    return [part if part.numel() else part.to(known) for part in found]
