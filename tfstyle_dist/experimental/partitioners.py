"""``tf.distribute.experimental.partitioners``."""

from tfstyle_dist.parameter_server.client.partitioning import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
