"""``tf.data``: what of it says how a dataset is divided."""

from tfstyle_dist.data import experimental

__all__ = ["experimental"]
