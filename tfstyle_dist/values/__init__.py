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
from tfstyle_dist.values.indexed_slices import IndexedSlices
from tfstyle_dist.values.shares import is_uneven, mark_uneven

__all__ = [
    "DistributedValues",
    "IndexedSlices",
    "Mirrored",
    "PerReplica",
    "ValueContext",
    "component_values",
    "is_uneven",
    "local_results",
    "mark_uneven",
    "regroup",
    "select_arguments",
    "select_replica",
]
