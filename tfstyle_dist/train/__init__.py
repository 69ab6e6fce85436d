"""Layer 5: TF-style optimizers and gradients."""

from tfstyle_dist.train.gradients import UnconnectedGradients, gradients
from tfstyle_dist.train.optimizer import Optimizer, TFOptimizer
from tfstyle_dist.train.optimizers import (
    AdagradOptimizer,
    AdamOptimizer,
    FtrlOptimizer,
    GradientDescentOptimizer,
    MomentumOptimizer,
    RMSPropOptimizer,
)

__all__ = [
    "AdagradOptimizer",
    "AdamOptimizer",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "RMSPropOptimizer",
    "TFOptimizer",
    "UnconnectedGradients",
    "gradients",
]
