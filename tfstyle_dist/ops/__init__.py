"""Sums of the replicas' tensors; the only package that imports the kernels."""

from tfstyle_dist.ops.aggregation import aggregate, aggregate_columns, aggregate_into, aggregate_list, explain

__all__ = ["aggregate", "aggregate_columns", "aggregate_into", "aggregate_list", "explain"]
