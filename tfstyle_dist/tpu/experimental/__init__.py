"""``tf.tpu.experimental``."""

from tfstyle_dist.core.lazy import loader
from tfstyle_dist.model_parallel import tensor_split
from tfstyle_dist.strategies import DeviceAssignment, initialize_tpu_system

__all__ = ["DeviceAssignment", "initialize_tpu_system", "tensor_split"]

__getattr__ = loader(__name__, {})  # says what to write for the rest of TensorFlow's
