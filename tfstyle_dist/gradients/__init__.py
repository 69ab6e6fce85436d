"""Layer 3: making gradients the same on all replicas, and who runs the optimizer."""

from tfstyle_dist.gradients.plan import Bucket, ReductionPlan
from tfstyle_dist.gradients.reducer import GradientReducer
from tfstyle_dist.gradients.update_runner import UpdateRunner
from tfstyle_dist.variables.gradient_policy import GradientPolicy

__all__ = ["Bucket", "GradientPolicy", "GradientReducer", "ReductionPlan", "UpdateRunner"]
