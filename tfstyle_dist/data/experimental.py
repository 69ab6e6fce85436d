"""``tf.data.experimental``."""

from tfstyle_dist.core.lazy import loader
from tfstyle_dist.input import AutoShardPolicy, DistributeOptions

__all__ = ["AutoShardPolicy", "DistributeOptions"]

__getattr__ = loader(__name__, {})  # says what to write for the rest of TensorFlow's
