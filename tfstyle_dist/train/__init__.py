"""Layer 5: TF-style optimizers and gradients, checkpoints, preemption."""

from tfstyle_dist.cluster_resolver import ClusterSpec
from tfstyle_dist.train.checkpoint import (
    Checkpoint,
    CheckpointManager,
    CheckpointOptions,
    CheckpointReader,
    CheckpointState,
    checkpoints_iterator,
    get_checkpoint_state,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
    load_variable,
)
from tfstyle_dist.train.gradients import UnconnectedGradients, gradients
from tfstyle_dist.train.optimizer import TFOptimizer
from tfstyle_dist.train.optimizers import (
    AdadeltaOptimizer,
    AdagradOptimizer,
    AdamOptimizer,
    FtrlOptimizer,
    GradientDescentOptimizer,
    MomentumOptimizer,
    RMSPropOptimizer,
)
from tfstyle_dist.train.random_state import RandomState
from tfstyle_dist.train.torch_optimizer import Optimizer

__all__ = [
    "AdadeltaOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "CheckpointReader",
    "CheckpointState",
    "ClusterSpec",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "RMSPropOptimizer",
    "RandomState",
    "TFOptimizer",
    "UnconnectedGradients",
    "checkpoints_iterator",
    "get_checkpoint_state",
    "gradients",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]
