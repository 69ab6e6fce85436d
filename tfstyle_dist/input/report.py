"""The shard report: who reads what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tfstyle_dist.input.options import AutoShardPolicy
from tfstyle_dist.input.sharding import Layout


@dataclass(frozen=True)
class WorkerShare:
    """One worker's line of the report.

    Attributes:
        worker: its number.
        samples: how many samples of an epoch its replicas get; ``None`` when that is not known in advance.
        files: the files that it reads; empty unless whole files are dealt out.
        reads: in words, what it reads.
    """

    worker: int
    samples: int | None
    files: Sequence[str]
    reads: str

    def __str__(self) -> str:
        count = "a number of samples not known in advance" if self.samples is None else f"{self.samples} samples"
        shown = ", ".join(self.files[:4]) + (", ..." if len(self.files) > 4 else "")
        files = f"; {len(self.files)} file(s): {shown}" if self.files else ""
        return f"  worker {self.worker}: {count} per epoch, {self.reads}{files}"


@dataclass(frozen=True)
class ShardReport:
    """How a dataset is dealt out; ``print`` it.

    Attributes:
        asked: the policy that was asked for; ``None`` for a ``dataset_fn``.
        policy: the policy that holds; ``None`` for a ``dataset_fn``.
        batch_size: samples of a global batch, when known.
        layout: numbers of workers and replicas.
        shares: one entry for each worker.
        notes: what the user may want to change.
    """

    asked: AutoShardPolicy | None
    policy: AutoShardPolicy | None
    batch_size: int | None
    layout: Layout
    shares: Sequence[WorkerShare]
    notes: Sequence[str] = field(default=())

    def __str__(self) -> str:
        policy = "dataset_fn" if self.policy is None else f"policy {self.policy.name}"
        if self.asked is not None and self.asked is not self.policy:
            policy += f" (from {self.asked.name})"
        size = "batches of the dataset's own size" if self.batch_size is None else f"global batch {self.batch_size}"
        head = f"Input: {policy}, {size}, {self.layout.workers} worker(s) of {self.layout.replicas} replica(s)"
        return "\n".join([head, *map(str, self.shares), *(f"  note: {n}" for n in self.notes)])
