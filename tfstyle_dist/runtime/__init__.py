"""Layer 2: a worker, its replicas, where they meet, and the context each thread is in."""

from tfstyle_dist.runtime.context import Frame, current_frame
from tfstyle_dist.runtime.executor import ReplicaExecutor
from tfstyle_dist.runtime.replica_run import InlineRun, ReplicaRun
from tfstyle_dist.runtime.turns import TurnRun
from tfstyle_dist.runtime.worker import Worker

__all__ = ["Frame", "InlineRun", "ReplicaExecutor", "ReplicaRun", "TurnRun", "Worker", "current_frame"]
