"""Layer 4: the strategies; each is a small specialisation of W workers times L replicas.

The names are loaded on first use: a script that trains with one strategy does not wait for the others' modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfstyle_dist.core.lazy import loader

if TYPE_CHECKING:
    from tfstyle_dist.strategies.base import Strategy as Strategy
    from tfstyle_dist.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
    from tfstyle_dist.strategies.contexts import (
        experimental_set_strategy as experimental_set_strategy,
        get_replica_context as get_replica_context,
        get_strategy as get_strategy,
        has_strategy as has_strategy,
        in_cross_replica_context as in_cross_replica_context,
    )
    from tfstyle_dist.strategies.extended import StrategyExtended as StrategyExtended
    from tfstyle_dist.strategies.mirrored import MirroredStrategy as MirroredStrategy
    from tfstyle_dist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from tfstyle_dist.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
    from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy as ParameterServerStrategy
    from tfstyle_dist.strategies.replica_context import ReplicaContext as ReplicaContext
    from tfstyle_dist.strategies.running import RunOptions as RunOptions
    from tfstyle_dist.strategies.tpu import (
        ExperimentalTPUStrategy as ExperimentalTPUStrategy,
        TPUStrategy as TPUStrategy,
    )
    from tfstyle_dist.strategies.tpu_devices import (
        DeviceAssignment as DeviceAssignment,
        initialize_tpu_system as initialize_tpu_system,
    )

_HOMES = {
    "CentralStorageStrategy": "central_storage",
    "DeviceAssignment": "tpu_devices",
    "ExperimentalTPUStrategy": "tpu",
    "MirroredStrategy": "mirrored",
    "MultiWorkerMirroredStrategy": "multi_worker_mirrored",
    "OneDeviceStrategy": "one_device",
    "ParameterServerStrategy": "parameter_server.strategy",
    "ReplicaContext": "replica_context",
    "RunOptions": "running",
    "Strategy": "base",
    "StrategyExtended": "extended",
    "TPUStrategy": "tpu",
    "experimental_set_strategy": "contexts",
    "get_replica_context": "contexts",
    "get_strategy": "contexts",
    "has_strategy": "contexts",
    "in_cross_replica_context": "contexts",
    "initialize_tpu_system": "tpu_devices",
}

__all__ = list(_HOMES)

__getattr__ = loader(__name__, _HOMES)
