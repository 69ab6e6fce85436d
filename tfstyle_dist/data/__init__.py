"""``tf.data``: what of it says how a dataset is divided."""

from tfstyle_dist.core.lazy import loader
from tfstyle_dist.data import experimental

__all__ = ["experimental"]

__getattr__ = loader(__name__, {})  # says what to write for the rest of TensorFlow's
