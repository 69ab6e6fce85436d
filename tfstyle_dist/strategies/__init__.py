"""Layer 4: the strategies; each is a small specialisation of W workers times L replicas."""

from tfstyle_dist.strategies.base import RunOptions, Strategy
from tfstyle_dist.strategies.central_storage import CentralStorageStrategy
from tfstyle_dist.strategies.contexts import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from tfstyle_dist.strategies.extended import StrategyExtended
from tfstyle_dist.strategies.mirrored import MirroredStrategy
from tfstyle_dist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from tfstyle_dist.strategies.one_device import OneDeviceStrategy
from tfstyle_dist.strategies.parameter_server import ParameterServerStrategy
from tfstyle_dist.strategies.replica_context import ReplicaContext
from tfstyle_dist.strategies.tpu import DeviceAssignment, ExperimentalTPUStrategy, TPUStrategy

__all__ = [
    "CentralStorageStrategy",
    "DeviceAssignment",
    "ExperimentalTPUStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
