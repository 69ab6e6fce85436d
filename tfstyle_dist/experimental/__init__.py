"""``tf.distribute.experimental``."""

from tfstyle_dist.comm.options import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from tfstyle_dist.elastic import Elastic
from tfstyle_dist.experimental import coordinator, partitioners, rpc
from tfstyle_dist.strategies import ExperimentalTPUStrategy as TPUStrategy, ParameterServerStrategy
from tfstyle_dist.strategies.averages import exact_mean
from tfstyle_dist.strategies.central_storage import CentralStorageStrategy
from tfstyle_dist.strategies.elastic import join
from tfstyle_dist.strategies.multi_worker_mirrored import (
    ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from tfstyle_dist.train.preemption import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from tfstyle_dist.values import ValueContext

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Elastic",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "exact_mean",
    "join",
    "partitioners",
    "rpc",
]
