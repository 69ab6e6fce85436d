"""Which gradients travel together: a fixed function of the parameters, equal on every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.cross_device_ops.collective import no_rows
from tfstyle_dist.variables.record import Record

DEFAULT_BYTES_PER_PACK = 25 * 1024 * 1024
HALF = (torch.float16, torch.bfloat16)
ROWS = 4096.0
"""The flag of a sparse gradient: 4096 of them, or 4095 dense ones, are still told apart in float32."""


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients share one flat buffer.

    The buffer holds the gradients one after the other and then one number per parameter: 1 where this replica has a
    gradient, ``ROWS`` where that is sparse, 0 where there is none. Their sums tell whether anybody used the parameter,
    and whether all who did have rows, without another message.

    Attributes:
        index: number of the bucket.
        records: its parameters.
        offsets: where each gradient begins.
        numel: elements of the gradients together; the flags follow.
        dtype: element type of the buffer; float32 for half precision parameters.
        device: where the buffer lives.
        kinds: shape and element type of each parameter, which may be gone when they are asked for.
    """

    index: int
    records: tuple[Record, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    kinds: tuple[tuple[torch.Size, torch.dtype], ...] = ()

    def only(self, records: Sequence[Record]) -> Bucket:
        """The bucket with some of its parameters alone."""
        offsets, total = [], 0
        for record in records:
            offsets.append(total)
            total += record.components[0].numel()
        kinds = tuple((r.components[0].shape, r.components[0].dtype) for r in records)
        return Bucket(self.index, tuple(records), tuple(offsets), total, self.dtype, self.device, kinds)

    def no_rows(self, position: int) -> torch.Tensor:
        """A sparse gradient without rows of one of the parameters."""
        shape, dtype = self.kinds[position]
        return no_rows(torch.empty((), dtype=dtype, device=self.device).expand(shape))

    def new_buffer(self) -> torch.Tensor:
        """A buffer for the gradients and flags."""
        return torch.zeros(self.numel + len(self.records), dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class ReductionPlan:
    """The buckets of one strategy, in the order in which they are sent.

    Attributes:
        buckets: dense gradients, last parameters first, as backward makes them.
        sparse: parameters whose gradients are rows (``nn.Embedding(sparse=True)``). What other
            modules make of ``functional.embedding(sparse=True)`` is seen by its flags alone.
        method: how contributions are summed.
    """

    buckets: tuple[Bucket, ...]
    sparse: tuple[Record, ...]
    method: int

    @property
    def records(self) -> list[Record]:
        """All parameters, in an order that is the same on all workers."""
        return [record for bucket in self.buckets for record in bucket.records] + list(self.sparse)

    @classmethod
    def build(
        cls, records: Sequence[Record], bytes_per_pack: int = 0, method: int = AggregationMethod.DEFAULT
    ) -> ReductionPlan:
        """Packs ``records`` (in the order of adoption) into buckets.

        Args:
            records: parameters that take gradients; those on the meta device, which have no values, get none.
            bytes_per_pack: about how many bytes a bucket holds; 0: 25 MiB.
            method: an ``AggregationMethod``.
        """
        limit = bytes_per_pack or DEFAULT_BYTES_PER_PACK
        dense = [r for r in records if not wants_sparse_gradient(r) and not r.components[0].is_meta]
        open_buckets: dict[tuple[torch.dtype, torch.device], list[Record]] = {}
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        groups: list[tuple[tuple[torch.dtype, torch.device], list[Record]]] = []
        for record in reversed(dense):
            first = record.components[0]
            dtype = torch.float32 if first.dtype in HALF else first.dtype
            key = (dtype, first.device)
            if key not in open_buckets:
                open_buckets[key], sizes[key] = [], 0
                groups.append((key, open_buckets[key]))
            open_buckets[key].append(record)
            sizes[key] += first.numel() * dtype.itemsize
            if sizes[key] >= limit:
                del open_buckets[key]
        buckets = tuple(Bucket(i, (), (), 0, *key).only(members) for i, (key, members) in enumerate(groups))
        return cls(buckets, tuple(r for r in records if wants_sparse_gradient(r)), method)


def has_rows(gradient: torch.Tensor) -> bool:
    """Whether it is sparse by its first dimension alone, as the rows of a table are."""
    return gradient.is_sparse and gradient.sparse_dim() == 1


def only_rows(flags: complex) -> bool:
    """Whether all workers that used a parameter have a sparse gradient of it.

    Args:
        flags: the sum of their flags; its type is that of the parameter's elements.
    """
    return flags != 0 and flags.real % ROWS == 0


def wants_sparse_gradient(record: Record) -> bool:
    """Whether the parameter's module says that its gradients are sparse; the same on every worker."""
    module = record.module() if record.module is not None else None
    return bool(getattr(module, "sparse", False)) and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
