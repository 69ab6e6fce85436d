"""Layer 5: checkpoints, saved by all workers together, restored by any number of them."""

from tfstyle_dist.checkpoint.checkpoint import Checkpoint
from tfstyle_dist.checkpoint.listing import (
    CheckpointState,
    checkpoints_iterator,
    get_checkpoint_state,
    latest_checkpoint,
)
from tfstyle_dist.checkpoint.manager import CheckpointManager
from tfstyle_dist.checkpoint.options import CheckpointOptions
from tfstyle_dist.checkpoint.random_state import RandomState
from tfstyle_dist.checkpoint.reader import CheckpointReader, list_variables, load_checkpoint, load_variable
from tfstyle_dist.checkpoint.status import CheckpointLoadStatus

__all__ = [
    "Checkpoint",
    "CheckpointLoadStatus",
    "CheckpointManager",
    "CheckpointOptions",
    "CheckpointReader",
    "CheckpointState",
    "RandomState",
    "checkpoints_iterator",
    "get_checkpoint_state",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]
