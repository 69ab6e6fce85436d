"""``tf.tpu``: what of it applies to any strategy."""

from tfstyle_dist.tpu import experimental

__all__ = ["experimental"]
