"""``tf.compat``: TensorFlow 1's paths."""

from tfstyle_dist.compat import v1

__all__ = ["v1"]
