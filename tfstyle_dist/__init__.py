"""tf.distribute for PyTorch: the names and the exact semantics of TensorFlow's distribution strategies.

Glossary:
    worker: one process.
    replica: one copy of the training step; a worker holds one or more.
    replicas in sync: all replicas of all workers.
    replica context: inside ``strategy.run``; cross-replica context: inside ``strategy.scope()`` or ``merge_call``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfstyle_dist.api import (
        AggregationMethod as AggregationMethod,
        AutoShardPolicy as AutoShardPolicy,
        CrossDeviceOps as CrossDeviceOps,
        DistributedDataset as DistributedDataset,
        DistributedIterator as DistributedIterator,
        DistributedValues as DistributedValues,
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
        IndexedSlices as IndexedSlices,
        InputContext as InputContext,
        InputOptions as InputOptions,
        InputReplicationMode as InputReplicationMode,
        MirroredStrategy as MirroredStrategy,
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
        NcclAllReduce as NcclAllReduce,
        OneDeviceStrategy as OneDeviceStrategy,
        ParameterServerStrategy as ParameterServerStrategy,
        ReduceOp as ReduceOp,
        ReductionToOneDevice as ReductionToOneDevice,
        ReplicaContext as ReplicaContext,
        RunOptions as RunOptions,
        Server as Server,
        Strategy as Strategy,
        StrategyExtended as StrategyExtended,
        TPUStrategy as TPUStrategy,
        Variable as Variable,
        VariableAggregation as VariableAggregation,
        VariableSynchronization as VariableSynchronization,
        cluster_resolver as cluster_resolver,
        coordinator as coordinator,
        errors as errors,
        experimental as experimental,
        experimental_set_strategy as experimental_set_strategy,
        get_replica_context as get_replica_context,
        get_strategy as get_strategy,
        has_strategy as has_strategy,
        in_cross_replica_context as in_cross_replica_context,
        model_parallel as model_parallel,
        nn as nn,
        tpu as tpu,
        train as train,
    )

__version__ = "0.1.0"

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
    "errors",
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


def __getattr__(name: str) -> Any:
    """Loads the public names on first use: torch is not imported by tools that only look at the package."""
    if name in __all__:
        from tfstyle_dist import api

        globals().update({n: getattr(api, n) for n in __all__})
        return globals()[name]
    raise AttributeError(f"module 'tfstyle_dist' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
