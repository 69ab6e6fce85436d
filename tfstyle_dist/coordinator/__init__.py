"""``tf.distribute.coordinator``: functions that run on worker tasks while the program goes on."""

from tfstyle_dist.coordinator.cluster_coordinator import ClusterCoordinator
from tfstyle_dist.coordinator.current_worker import experimental_get_current_worker_index
from tfstyle_dist.coordinator.per_worker import PerWorkerValues
from tfstyle_dist.coordinator.remote_value import RemoteValue

PerWorkerValue = PerWorkerValues

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValue",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]
