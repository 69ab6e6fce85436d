"""Layer 5: TF-style optimizers and gradients, preemption; the public names of checkpoints."""

from tfstyle_dist.checkpoint import (
    Checkpoint,
    CheckpointManager,
    CheckpointOptions,
    CheckpointReader,
    CheckpointState,
    RandomState,
    checkpoints_iterator,
    get_checkpoint_state,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
    load_variable,
)
from tfstyle_dist.cluster_resolver import ClusterSpec
from tfstyle_dist.core.lazy import loader
from tfstyle_dist.train import optimizer_leaf
from tfstyle_dist.train.ftrl import FtrlOptimizer
from tfstyle_dist.train.gradients import UnconnectedGradients, gradients
from tfstyle_dist.train.optimizer import TFOptimizer
from tfstyle_dist.train.optimizers import (
    AdadeltaOptimizer,
    AdagradOptimizer,
    AdamOptimizer,
    GradientDescentOptimizer,
    MomentumOptimizer,
    RMSPropOptimizer,
)
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

__getattr__ = loader(__name__, {})  # says what to write for the rest of TensorFlow's

optimizer_leaf.install()
