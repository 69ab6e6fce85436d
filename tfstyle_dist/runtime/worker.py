"""A worker: its local replicas and the group it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.runtime.clocks import STOPPED, Clock
from tfstyle_dist.runtime.executor import ReplicaExecutor


class Worker:
    """L local replicas in one of W worker processes.

    Args:
        devices: one device for each local replica; ``()`` for the default strategy, which has no device of its own.
        group: the worker processes.
        timeout: limit of each wait for another replica.

    Attributes:
        num_local_replicas: L.
        num_replicas: replicas of all workers, W * L.
        clocks: one for each local replica; stopped unless a monitor starts them.
        positions: where the datasets stand, if workers may come back and must know it; ``None`` otherwise.
    """

    positions: Any = None

    def __init__(self, devices: Sequence[ReplicaDevice], group: WorkerGroup, timeout: timedelta | None) -> None:
        self.devices, self.group, self.timeout = tuple(devices), group, timeout
        self.num_local_replicas = max(len(self.devices), 1)
        self.num_replicas = group.size * self.num_local_replicas
        self.clocks: list[Clock] = [STOPPED] * self.num_local_replicas
        self.executor = ReplicaExecutor(self.devices, timeout, self.clocks)

    def replica_id(self, local_replica_id: int) -> int:
        """Number among all replicas of local replica ``local_replica_id``."""
        return self.group.rank * self.num_local_replicas + local_replica_id

    def torch_device(self, local_replica_id: int) -> torch.device:
        """Where tensors of a local replica live."""
        return self.devices[local_replica_id].torch_device if self.devices else torch.device("cpu")

    def computes_elsewhere(self, home: torch.device) -> bool:
        """Whether some local replica needs copies of what is kept on a device."""
        return any(device.torch_device != home for device in self.devices)

    def one_device(self) -> bool:
        """Whether all local replicas share one torch device."""
        return len({d.torch_device for d in self.devices}) <= 1

    def draw_seed(self) -> int:
        """A seed from torch's random numbers."""
        return int(torch.empty((), dtype=torch.int64).random_().item())

    def close(self) -> None:
        """Ends the replica threads and leaves the group."""
        self.executor.close()
        self.group.close()
