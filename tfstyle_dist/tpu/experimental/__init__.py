"""``tf.tpu.experimental``."""

from tfstyle_dist.model_parallel import tensor_split

__all__ = ["tensor_split"]
