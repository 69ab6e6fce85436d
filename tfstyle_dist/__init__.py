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
    )
    from tfstyle_dist.api import (
        AutoShardPolicy as AutoShardPolicy,
    )
    from tfstyle_dist.api import (
        CrossDeviceOps as CrossDeviceOps,
    )
    from tfstyle_dist.api import (
        DistributedDataset as DistributedDataset,
    )
    from tfstyle_dist.api import (
        DistributedIterator as DistributedIterator,
    )
    from tfstyle_dist.api import (
        DistributedValues as DistributedValues,
    )
    from tfstyle_dist.api import (
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    )
    from tfstyle_dist.api import (
        InputContext as InputContext,
    )
    from tfstyle_dist.api import (
        InputOptions as InputOptions,
    )
    from tfstyle_dist.api import (
        InputReplicationMode as InputReplicationMode,
    )
    from tfstyle_dist.api import (
        MirroredStrategy as MirroredStrategy,
    )
    from tfstyle_dist.api import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from tfstyle_dist.api import (
        NcclAllReduce as NcclAllReduce,
    )
    from tfstyle_dist.api import (
        OneDeviceStrategy as OneDeviceStrategy,
    )
    from tfstyle_dist.api import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from tfstyle_dist.api import (
        ReduceOp as ReduceOp,
    )
    from tfstyle_dist.api import (
        ReductionToOneDevice as ReductionToOneDevice,
    )
    from tfstyle_dist.api import (
        ReplicaContext as ReplicaContext,
    )
    from tfstyle_dist.api import (
        RunOptions as RunOptions,
    )
    from tfstyle_dist.api import (
        Server as Server,
    )
    from tfstyle_dist.api import (
        Strategy as Strategy,
    )
    from tfstyle_dist.api import (
        StrategyExtended as StrategyExtended,
    )
    from tfstyle_dist.api import (
        TPUStrategy as TPUStrategy,
    )
    from tfstyle_dist.api import (
        Variable as Variable,
    )
    from tfstyle_dist.api import (
        VariableAggregation as VariableAggregation,
    )
    from tfstyle_dist.api import (
        VariableSynchronization as VariableSynchronization,
    )
    from tfstyle_dist.api import (
        cluster_resolver as cluster_resolver,
    )
    from tfstyle_dist.api import (
        coordinator as coordinator,
    )
    from tfstyle_dist.api import (
        errors as errors,
    )
    from tfstyle_dist.api import (
        experimental as experimental,
    )
    from tfstyle_dist.api import (
        experimental_set_strategy as experimental_set_strategy,
    )
    from tfstyle_dist.api import (
        get_replica_context as get_replica_context,
    )
    from tfstyle_dist.api import (
        get_strategy as get_strategy,
    )
    from tfstyle_dist.api import (
        has_strategy as has_strategy,
    )
    from tfstyle_dist.api import (
        in_cross_replica_context as in_cross_replica_context,
    )
    from tfstyle_dist.api import (
        model_parallel as model_parallel,
    )
    from tfstyle_dist.api import (
        nn as nn,
    )
    from tfstyle_dist.api import (
        tpu as tpu,
    )
    from tfstyle_dist.api import (
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
