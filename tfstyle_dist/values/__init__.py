"""Layer 1: values that differ from replica to replica."""

from tfstyle_dist.values.distributed_values import (
    DistributedValues,
    PerReplica,
    ValueContext,
    component_values,
    local_results,
    regroup,
    select_arguments,
    select_replica,
)
from tfstyle_dist.values.indexed_slices import IndexedSlices
from tfstyle_dist.values.mirrored import Mirrored
from tfstyle_dist.values.shares import (
    Division,
    Share,
    any_noted,
    common_share,
    cut_evenly,
    has_unequal_shares,
    may_be_nan,
    note_batch,
    note_collated,
    note_result,
    share_of_arguments,
    share_of_result,
    shares_of_results,
    without_nothing,
)

__all__ = [
    "DistributedValues",
    "Division",
    "IndexedSlices",
    "Mirrored",
    "PerReplica",
    "Share",
    "ValueContext",
    "any_noted",
    "common_share",
    "component_values",
    "cut_evenly",
    "has_unequal_shares",
    "local_results",
    "may_be_nan",
    "note_batch",
    "note_collated",
    "note_result",
    "regroup",
    "select_arguments",
    "select_replica",
    "share_of_arguments",
    "share_of_result",
    "shares_of_results",
    "without_nothing",
]
