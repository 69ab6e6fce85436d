"""Layer 2: a worker, its replicas, where they meet, and the context each thread is in."""

from tfstyle_dist.runtime.context import Frame, current_frame
from tfstyle_dist.runtime.executor import ReplicaExecutor
from tfstyle_dist.runtime.rendezvous import InlineRun, ReplicaRun, ThreadedRun
from tfstyle_dist.runtime.worker import Worker

__all__ = ["Frame", "InlineRun", "ReplicaExecutor", "ReplicaRun", "ThreadedRun", "Worker", "current_frame"]
