"""The public names, imported eagerly; ``tfstyle_dist`` itself hands them out on first use."""

from tfstyle_dist import cluster_resolver, coordinator, experimental, model_parallel, nn, tpu, train
from tfstyle_dist.coordinator.server import Server
from tfstyle_dist.core import errors as errors
from tfstyle_dist.core.enums import (
    AggregationMethod,
    InputReplicationMode,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from tfstyle_dist.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from tfstyle_dist.input import AutoShardPolicy, DistributedDataset, DistributedIterator, InputContext, InputOptions
from tfstyle_dist.strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
    ReplicaContext,
    RunOptions,
    Strategy,
    StrategyExtended,
    TPUStrategy,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from tfstyle_dist.values import DistributedValues, IndexedSlices
from tfstyle_dist.variables import Variable

__all__ = [
    "AggregationMethod",
    "AutoShardPolicy",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "cluster_resolver",
    "coordinator",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "model_parallel",
    "nn",
    "tpu",
    "train",
]
