"""What a user says about input: sharding policy, pipeline context, options."""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass, field
from typing import Any

from tfstyle_dist.core.enums import InputReplicationMode


class AutoShardPolicy(enum.Enum):
    """How a dataset is dealt out to the worker processes (``tf.data.experimental.AutoShardPolicy``).

    * ``OFF``: not at all; every worker reads everything.
    * ``AUTO``: ``FILE`` for a dataset that lists its files, else ``DATA``.
    * ``FILE``: whole files, in turn; fewer files than workers is an error.
    * ``DATA``: every global batch is cut into one piece for each replica.
    * ``HINT``: the dataset's own method ``shard(num_shards, index)``.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


def check_policy(value: Any, what: str = "auto_shard_policy") -> AutoShardPolicy:
    """``value``, which must be an ``AutoShardPolicy``.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, AutoShardPolicy):
        raise TypeError(
            f"{what} must be an AutoShardPolicy, got {value!r} ({type(value).__name__}); write e.g. "
            "AutoShardPolicy.OFF."
        )
    return value


def whole_number(value: Any, what: str) -> int:
    """``value`` as an ``int``; whole numbers of numpy and torch are taken too.

    Raises:
        TypeError: it is no whole number.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{what} must be a whole number, got {type(value).__name__}: {value!r}; write e.g. {what}=2.")


class InputContext:
    """Which input pipeline a ``dataset_fn`` is asked for (``tf.distribute.InputContext``).

    Args:
        num_input_pipelines: how many pipelines there are.
        input_pipeline_id: number of this one, from 0.
        num_replicas_in_sync: replicas of all workers.

    Example:
        >>> def dataset_fn(context):
        ...     return DataLoader(data, batch_size=context.get_per_replica_batch_size(64))
        >>> strategy.distribute_datasets_from_function(dataset_fn)
    """

    def __init__(self, num_input_pipelines: int = 1, input_pipeline_id: int = 0, num_replicas_in_sync: int = 1) -> None:
        self._num_input_pipelines = num_input_pipelines
        self._input_pipeline_id = input_pipeline_id
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def num_input_pipelines(self) -> int:
        """How many pipelines there are."""
        return self._num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        """Number of this pipeline, from 0."""
        return self._input_pipeline_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of all workers."""
        return self._num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The share of one replica.

        Args:
            global_batch_size: examples of all replicas together.

        Returns:
            ``global_batch_size / num_replicas_in_sync``.

        Raises:
            TypeError: it is no number.
            ValueError: it does not divide evenly.

        Example:
            >>> InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(12)
            3
        """
        try:
            share = global_batch_size // self._num_replicas_in_sync
            rest = global_batch_size % self._num_replicas_in_sync
        except TypeError:
            raise TypeError(
                f"global_batch_size must be a number, got {type(global_batch_size).__name__}: {global_batch_size!r}; "
                "write e.g. context.get_per_replica_batch_size(64)."
            ) from None
        if rest:
            raise ValueError(
                f"The global_batch_size {global_batch_size} is not divisible by num_replicas_in_sync "
                f"{self._num_replicas_in_sync}. Choose a multiple of it, or use "
                "strategy.experimental_distribute_dataset, which splits any batch."
            )
        return share

    def __str__(self) -> str:
        return (
            f"tf.distribute.InputContext(input pipeline id {self._input_pipeline_id}, total: "
            f"{self._num_input_pipelines}, replicas in sync: {self._num_replicas_in_sync})"
        )

    __repr__ = __str__


@dataclass
class DistributeOptions:
    """How a dataset is divided (``tf.data.experimental.DistributeOptions``); to be filled in.

    ``Strategy.experimental_distribute_dataset`` takes it as ``auto_shard_policy``.

    Attributes:
        auto_shard_policy: how the workers divide the dataset.
        num_devices: accepted for TF's signature.

    Raises:
        AttributeError: another option is set.
        TypeError: a policy that is no ``AutoShardPolicy``.

    Example:
        >>> options = DistributeOptions()
        >>> options.auto_shard_policy = AutoShardPolicy.DATA
        >>> strategy.experimental_distribute_dataset(loader, auto_shard_policy=options)
    """

    auto_shard_policy: AutoShardPolicy = field(default=AutoShardPolicy.AUTO, init=False)
    num_devices: int | None = field(default=None, init=False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("auto_shard_policy", "num_devices"):
            raise AttributeError(
                f"DistributeOptions has no option {name!r}, so setting it would change nothing; its options are "
                "auto_shard_policy and num_devices."
            )
        object.__setattr__(self, name, check_policy(value) if name == "auto_shard_policy" else value)


@dataclass(frozen=True)
class InputOptions:
    """How batches reach the replicas (``tf.distribute.InputOptions``).

    Args:
        experimental_fetch_to_device: whether batches are moved to the replicas' devices ahead of time; ``None``: yes.
        experimental_replication_mode: one pipeline for each worker, or for each replica.
        experimental_place_dataset_on_device: TensorFlow's alternative to fetching; accepted with ``PER_REPLICA`` and
            ``experimental_fetch_to_device=False``.
        experimental_per_replica_buffer_size: how many batches are moved ahead.

    Raises:
        TypeError: a value of another kind than named here.
        ValueError: a buffer of less than one batch.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        mode = self.experimental_replication_mode
        if not isinstance(mode, InputReplicationMode):
            raise TypeError(
                f"experimental_replication_mode must be an InputReplicationMode, got {mode!r}; write e.g. "
                "InputReplicationMode.PER_REPLICA."
            )
        for name in ("experimental_fetch_to_device", "experimental_place_dataset_on_device"):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (value is None and name == "experimental_fetch_to_device")):
                raise TypeError(f"{name} must be True or False, got {value!r}; write {name}=False or {name}=True.")
        size = whole_number(self.experimental_per_replica_buffer_size, "experimental_per_replica_buffer_size")
        object.__setattr__(self, "experimental_per_replica_buffer_size", size)
        if self.experimental_per_replica_buffer_size < 1:
            raise ValueError(
                "experimental_per_replica_buffer_size must be at least 1, got "
                f"{self.experimental_per_replica_buffer_size}; to keep batches where they are pass "
                "experimental_fetch_to_device=False."
            )
        if self.experimental_fetch_to_device is None:
            object.__setattr__(self, "experimental_fetch_to_device", True)

    def check(self, from_function: bool) -> None:
        """Refuses combinations that mean nothing.

        Args:
            from_function: whether the pipelines come from a ``dataset_fn``.

        Raises:
            NotImplementedError: one pipeline for each replica without a ``dataset_fn``.
            ValueError: a dataset placed on a device that batches are also fetched to, or that is not per replica.
        """
        per_replica = self.experimental_replication_mode is InputReplicationMode.PER_REPLICA
        if per_replica and not from_function:
            raise NotImplementedError(
                "InputReplicationMode.PER_REPLICA is only supported in strategy.distribute_datasets_from_function: "
                "one dataset cannot be several pipelines. Pass a dataset_fn there, or use PER_WORKER."
            )
        if self.experimental_place_dataset_on_device and not per_replica:
            raise ValueError(
                "experimental_place_dataset_on_device=True needs "
                "experimental_replication_mode=InputReplicationMode.PER_REPLICA."
            )
        if self.experimental_place_dataset_on_device and self.experimental_fetch_to_device:
            raise ValueError(
                "experimental_place_dataset_on_device=True excludes experimental_fetch_to_device=True (the default): "
                "pass experimental_fetch_to_device=False as well."
            )
