"""Layer 1: groups of worker processes. Nothing else talks to ``torch.distributed``."""

from tfstyle_dist.comm.collectives.operations import Operation
from tfstyle_dist.comm.group import Pending, WorkerGroup
from tfstyle_dist.comm.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from tfstyle_dist.comm.single_group import SingleGroup

__all__ = [
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "Operation",
    "Pending",
    "SingleGroup",
    "WorkerGroup",
]
