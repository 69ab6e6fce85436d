"""Layer 1: values that differ from replica to replica."""

from tfstyle_dist.values.distributed_values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ValueContext,
    component_values,
    local_results,
    regroup,
    select_arguments,
    select_replica,
)

__all__ = [
    "DistributedValues",
    "Mirrored",
    "PerReplica",
    "ValueContext",
    "component_values",
    "local_results",
    "regroup",
    "select_arguments",
    "select_replica",
]
