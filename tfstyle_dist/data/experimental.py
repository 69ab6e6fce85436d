"""``tf.data.experimental``."""

from tfstyle_dist.input import AutoShardPolicy, DistributeOptions

__all__ = ["AutoShardPolicy", "DistributeOptions"]
