"""The all-reduce ops of TensorFlow; on one host all of them are one sum and copies of it."""

from __future__ import annotations

from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.cross_device_ops.base import CrossDeviceOps


class _PackedAllReduce(CrossDeviceOps):
    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(f"num_packs must be >= 0, got {num_packs}; 0 packs nothing.")
        self.num_packs = num_packs


class NcclAllReduce(_PackedAllReduce):
    """The all-reduce that strategies use between GPUs anyway (``tf.distribute.NcclAllReduce``).

    Between processes NCCL sums. Between GPUs of one process each sums a slice of every bucket, and the slices are
    copied: NCCL is not called there. On the CPU it sums like every other op.

    Args:
        num_packs: into how many packs gradients are split; 0 packs nothing.

    Raises:
        ValueError: ``num_packs`` is negative.

    Example:
        >>> MirroredStrategy(["cuda:0", "cuda:1"], cross_device_ops=NcclAllReduce())
    """


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """All-reduce by a tree over the devices of one host (``tf.distribute.HierarchicalCopyAllReduce``).

    Args:
        num_packs: into how many packs gradients are split; 0 packs nothing.

    Raises:
        ValueError: ``num_packs`` is negative.

    Example:
        >>> MirroredStrategy(cross_device_ops=HierarchicalCopyAllReduce(num_packs=2))
    """

    aggregation_method = AggregationMethod.EXPERIMENTAL_TREE
