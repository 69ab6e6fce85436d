"""tf.distribute for PyTorch: the names and the exact semantics of TensorFlow's distribution strategies.

Glossary:
    worker: one process.
    replica: one copy of the training step; a worker holds one or more.
    replicas in sync: all replicas of all workers.
    replica context: inside ``strategy.run``; cross-replica context: inside ``strategy.scope()`` or ``merge_call``.
"""

from tfstyle_dist import experimental, nn, train
from tfstyle_dist.core.enums import AggregationMethod, ReduceOp, VariableAggregation, VariableSynchronization
from tfstyle_dist.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from tfstyle_dist.strategies import (
    MirroredStrategy,
    OneDeviceStrategy,
    ReplicaContext,
    RunOptions,
    Strategy,
    StrategyExtended,
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from tfstyle_dist.values import DistributedValues
from tfstyle_dist.variables import Variable

__version__ = "0.1.0"

__all__ = [
    "AggregationMethod",
    "CrossDeviceOps",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "nn",
    "train",
]
