"""Layer 5: TF-style optimizers and gradients."""

from tfstyle_dist.train.gradients import UnconnectedGradients, gradients
from tfstyle_dist.train.optimizer import TFOptimizer
from tfstyle_dist.train.optimizers import (
    AdagradOptimizer,
    AdamOptimizer,
    FtrlOptimizer,
    GradientDescentOptimizer,
    MomentumOptimizer,
    RMSPropOptimizer,
)
from tfstyle_dist.train.torch_optimizer import Optimizer

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
