"""``tf.distribute.experimental.coordinator``: older names of ``tf.distribute.coordinator``."""

from tfstyle_dist.coordinator import ClusterCoordinator, PerWorkerValues, RemoteValue

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue"]
