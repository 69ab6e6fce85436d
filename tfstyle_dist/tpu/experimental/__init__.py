"""``tf.tpu.experimental``."""

from tfstyle_dist.model_parallel import tensor_split
from tfstyle_dist.strategies import DeviceAssignment

__all__ = ["DeviceAssignment", "tensor_split"]
