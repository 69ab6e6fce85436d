"""The all-reduce ops of TensorFlow; here they differ in the order of addition alone."""

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

    It changes nothing: its sums are those of a strategy that is given no op, bit for bit. Between processes that have
    GPUs NCCL makes them, unless ``CommunicationOptions(implementation=...)`` says something else. Between GPUs of one
    process NCCL is not called: each sums a slice of every bucket, and the slices are copied. On the CPU it sums like
    every other op.

    Args:
        num_packs: checked as in TensorFlow, without effect: ``CommunicationOptions(bytes_per_pack=...)`` says how much
            of the gradients travels at once.

    Raises:
        ValueError: ``num_packs`` is negative.

    Example:
        >>> MirroredStrategy(["cuda:0", "cuda:1"], cross_device_ops=NcclAllReduce())
    """


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """Adds in the order of a tree over the replicas (``tf.distribute.HierarchicalCopyAllReduce``).

    That is ``ReductionToOneDevice(aggregation_method=AggregationMethod.TREE)``. What travels between the devices takes
    the same way as without it.

    Args:
        num_packs: checked as in TensorFlow, without effect: ``CommunicationOptions(bytes_per_pack=...)`` says how much
            of the gradients travels at once.

    Raises:
        ValueError: ``num_packs`` is negative.

    Example:
        >>> MirroredStrategy(cross_device_ops=HierarchicalCopyAllReduce(num_packs=2))
    """

    aggregation_method = AggregationMethod.EXPERIMENTAL_TREE
