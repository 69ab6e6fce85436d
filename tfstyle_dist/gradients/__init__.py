"""Layer 3: making gradients the same on all replicas, and who runs the optimizer."""

from tfstyle_dist.gradients.buckets import Bucket, ReductionPlan
from tfstyle_dist.gradients.optimizer_step import UpdateRunner
from tfstyle_dist.gradients.reducer import GradientReducer
from tfstyle_dist.variables.gradient_policy import GradientPolicy

__all__ = ["Bucket", "GradientPolicy", "GradientReducer", "ReductionPlan", "UpdateRunner"]
