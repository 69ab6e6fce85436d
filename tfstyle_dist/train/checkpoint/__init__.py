"""Checkpoints: saved by all workers together, restored by any number of them."""

from tfstyle_dist.train.checkpoint.checkpoint import Checkpoint, CheckpointOptions
from tfstyle_dist.train.checkpoint.listing import (
    CheckpointReader,
    CheckpointState,
    checkpoints_iterator,
    get_checkpoint_state,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
    load_variable,
)
from tfstyle_dist.train.checkpoint.manager import CheckpointManager
from tfstyle_dist.train.checkpoint.status import CheckpointLoadStatus

__all__ = [
    "Checkpoint",
    "CheckpointLoadStatus",
    "CheckpointManager",
    "CheckpointOptions",
    "CheckpointReader",
    "CheckpointState",
    "checkpoints_iterator",
    "get_checkpoint_state",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
]
