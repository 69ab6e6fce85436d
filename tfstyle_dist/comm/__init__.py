"""Layer 1: groups of worker processes. No other layer moves tensors by ``torch.distributed``.

A new way between workers is a ``WorkerGroup``, as in ``xla``. Another library below the sums of ``collectives`` is what
``TorchTransport`` is to ``TorchGroup``.
"""

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
