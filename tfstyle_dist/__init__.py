"""tf.distribute for PyTorch: the names and the exact semantics of TensorFlow's distribution strategies.

Glossary:
    worker: one process.
    replica: one copy of the training step; a worker holds one or more.
    replicas in sync: all replicas of all workers.
    replica context: inside ``strategy.run``; cross-replica context: inside ``strategy.scope()`` or ``merge_call``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfstyle_dist.core.lazy import loader

if TYPE_CHECKING:
    from tfstyle_dist import (
        cluster_resolver as cluster_resolver,
        compat as compat,
        config as config,
        coordinator as coordinator,
        data as data,
        distribute as distribute,
        experimental as experimental,
        model_parallel as model_parallel,
        nn as nn,
        tpu as tpu,
        train as train,
    )
    from tfstyle_dist.coordinator.server import Server as Server
    from tfstyle_dist.core import errors as errors
    from tfstyle_dist.core.enums import (
        AggregationMethod as AggregationMethod,
        InputReplicationMode as InputReplicationMode,
        ReduceOp as ReduceOp,
        VariableAggregation as VariableAggregation,
        VariableSynchronization as VariableSynchronization,
    )
    from tfstyle_dist.cross_device_ops import (
        CrossDeviceOps as CrossDeviceOps,
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
        NcclAllReduce as NcclAllReduce,
        ReductionToOneDevice as ReductionToOneDevice,
    )
    from tfstyle_dist.functions import function as function, print as print
    from tfstyle_dist.input import (
        AutoShardPolicy as AutoShardPolicy,
        DistributedDataset as DistributedDataset,
        DistributedIterator as DistributedIterator,
        InputContext as InputContext,
        InputOptions as InputOptions,
    )
    from tfstyle_dist.strategies import (
        MirroredStrategy as MirroredStrategy,
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
        OneDeviceStrategy as OneDeviceStrategy,
        ParameterServerStrategy as ParameterServerStrategy,
        ReplicaContext as ReplicaContext,
        RunOptions as RunOptions,
        Strategy as Strategy,
        StrategyExtended as StrategyExtended,
        TPUStrategy as TPUStrategy,
        experimental_set_strategy as experimental_set_strategy,
        get_replica_context as get_replica_context,
        get_strategy as get_strategy,
        has_strategy as has_strategy,
        in_cross_replica_context as in_cross_replica_context,
    )
    from tfstyle_dist.train import UnconnectedGradients as UnconnectedGradients
    from tfstyle_dist.values import DistributedValues as DistributedValues, IndexedSlices as IndexedSlices
    from tfstyle_dist.variables import Variable as Variable

__version__ = "0.2.0"

_HOMES = {
    "AggregationMethod": "core.enums",
    "AutoShardPolicy": "input",
    "CrossDeviceOps": "cross_device_ops",
    "DistributedDataset": "input",
    "DistributedIterator": "input",
    "DistributedValues": "values",
    "HierarchicalCopyAllReduce": "cross_device_ops",
    "IndexedSlices": "values",
    "InputContext": "input",
    "InputOptions": "input",
    "InputReplicationMode": "core.enums",
    "MirroredStrategy": "strategies",
    "MultiWorkerMirroredStrategy": "strategies",
    "NcclAllReduce": "cross_device_ops",
    "OneDeviceStrategy": "strategies",
    "ParameterServerStrategy": "strategies",
    "ReduceOp": "core.enums",
    "ReductionToOneDevice": "cross_device_ops",
    "ReplicaContext": "strategies",
    "RunOptions": "strategies",
    "Server": "coordinator.server",
    "Strategy": "strategies",
    "StrategyExtended": "strategies",
    "TPUStrategy": "strategies",
    "UnconnectedGradients": "train",
    "Variable": "variables",
    "VariableAggregation": "core.enums",
    "VariableSynchronization": "core.enums",
    "cluster_resolver": "cluster_resolver",
    "compat": "compat",
    "config": "config",
    "coordinator": "coordinator",
    "data": "data",
    "distribute": "distribute",
    "errors": "core.errors",
    "experimental": "experimental",
    "experimental_set_strategy": "strategies",
    "function": "functions",
    "get_replica_context": "strategies",
    "get_strategy": "strategies",
    "has_strategy": "strategies",
    "in_cross_replica_context": "strategies",
    "model_parallel": "model_parallel",
    "nn": "nn",
    "print": "functions",
    "tpu": "tpu",
    "train": "train",
}
"""Where each public name is defined: a module of the package; one of the same name is what is public."""

__all__ = [name for name in _HOMES if name != "print"]  # an import of * leaves Python's print what it is


__getattr__ = loader(__name__, _HOMES)  # torch is not imported by tools that only look at the package


def __dir__() -> list[str]:
    """The public names."""
    return [*_HOMES, "__version__"]
