"""What the user asked for, and what is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tfstyle_dist.input.options import AutoShardPolicy, check_policy
from tfstyle_dist.input.pipeline import Pipeline
from tfstyle_dist.input.sharding import Layout, count_samples
from tfstyle_dist.runtime.worker import Worker


@dataclass
class Request:
    """What the user asked for.

    Attributes:
        worker: replicas and group.
        policy: the sharding policy, not yet resolved.
        batch_size: ``global_batch_size=``.
        shuffle: whether a map-style dataset is shuffled anew in each epoch.
        seed: of the shuffled order; ``None``: drawn from torch's random numbers on worker 0.
        drop_remainder: whether a smaller last batch is left out.
        loader_options: further arguments of ``DataLoader``.

    Raises:
        TypeError: a policy that is no ``AutoShardPolicy``.
    """

    worker: Worker
    policy: AutoShardPolicy = AutoShardPolicy.AUTO
    batch_size: int | None = None
    shuffle: bool = False
    seed: int | None = None
    drop_remainder: bool = False
    loader_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_policy(self.policy)

    @property
    def layout(self) -> Layout:
        """Numbers of workers and replicas."""
        return Layout(self.worker.group.size, self.worker.group.rank, self.worker.num_local_replicas)


@dataclass
class Plan:
    """A pipeline and what the shard report says of it.

    Attributes:
        pipeline: this worker's steps.
        policy: the policy that holds.
        batch_size: samples of a global batch, when known.
        samples: samples of an epoch, when known.
        reads: what a worker reads, in words.
        files: the files of each worker, when whole files are dealt out.
        notes: what the user may want to change.
    """

    pipeline: Pipeline
    policy: AutoShardPolicy | None
    batch_size: int | None
    samples: int | None
    reads: str
    files: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()

    def samples_of(self, layout: Layout) -> int | None:
        """Samples that one worker's replicas get."""
        if self.samples is None or self.batch_size is None or self.policy is None:
            return None
        drop = getattr(getattr(self.pipeline, "sampler", None), "drop_remainder", False)
        return count_samples(self.samples, self.batch_size, drop, layout, self.policy)
