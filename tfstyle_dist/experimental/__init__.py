"""``tf.distribute.experimental``."""

from tfstyle_dist.comm.options import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from tfstyle_dist.strategies import ExperimentalTPUStrategy as TPUStrategy
from tfstyle_dist.strategies.averages import exact_mean
from tfstyle_dist.strategies.central_storage import CentralStorageStrategy
from tfstyle_dist.values import ValueContext

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "TPUStrategy",
    "ValueContext",
    "exact_mean",
]
