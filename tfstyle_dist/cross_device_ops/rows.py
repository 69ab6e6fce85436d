"""``IndexedSlices`` of several replicas: one after the other, or as the larger tensor that they are rows of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tfstyle_dist.core.enums import ReduceOp
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.cross_device_ops.collective import gather_over_workers
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.values import IndexedSlices


def reduce_rows(worker: Worker | None, op: ReduceOp, rows: Sequence[IndexedSlices]) -> IndexedSlices:
    """The rows of all replicas one after the other; of a mean each is divided by the number of replicas.

    Args:
        worker: whose replicas these are; ``None``: there are no others.
        op: SUM or MEAN.
        rows: of each local replica.
    """
    with torch.no_grad():
        values = gather_over_workers(worker, [r.values.detach() for r in rows], 0, "reduce (rows)")
        numbers = gather_over_workers(worker, [r.indices for r in rows], 0, "reduce (their numbers)")
        count = len(rows) if worker is None else worker.num_replicas
        return IndexedSlices(values / count if op is ReduceOp.MEAN else values, numbers, rows[0].dense_shape)


def dense_rows(rows: IndexedSlices, what: str) -> torch.Tensor:
    """The larger tensor with these rows in it; of a row that is named several times their sum.

    Args:
        rows: know their ``dense_shape``.
        what: the call, for messages.

    Raises:
        InvalidArgumentError: they do not.
    """
    if rows.dense_shape is None:
        raise InvalidArgumentError(
            f"{what}: {rows!r} must be made dense here, but does not say how large it is; give its dense_shape: "
            "IndexedSlices(values, indices, dense_shape)."
        )
    shape = torch.Size([int(size) for size in rows.dense_shape])
    values = rows.values.detach().reshape(-1, *shape[1:])
    return values.new_zeros(shape).index_put_((rows.indices.reshape(-1).long(),), values, accumulate=True)
