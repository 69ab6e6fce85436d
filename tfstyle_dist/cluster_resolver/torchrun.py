"""``TorchrunClusterResolver``: the workers that torchrun started."""

from __future__ import annotations

from tfstyle_dist.cluster_resolver.base import ClusterResolver
from tfstyle_dist.cluster_resolver.cluster_spec import ClusterSpec
from tfstyle_dist.core import launch_env


class TorchrunClusterResolver(ClusterResolver):
    """The workers of ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``; each is a task ``worker``.

    torchrun, ``accelerate launch`` and other launchers set these. They tell the address of worker 0 alone, so the
    others are listed as ``"rank-<n>"``. Not in TensorFlow.

    Args:
        rpc_layer: prefix of the address that ``master`` returns.

    Raises:
        RuntimeError: the variables are not set.
        ValueError: they contradict each other.

    Example:
        >>> strategy = MultiWorkerMirroredStrategy(TorchrunClusterResolver())  # what it does by itself, too
    """

    def __init__(self, rpc_layer: str | None = None) -> None:
        launch = launch_env.launch()
        if launch is None:
            raise RuntimeError("RANK and WORLD_SIZE are not set: start the script with torchrun.")
        self._task_type, self._task_id, self._rpc_layer = "worker", launch.rank, rpc_layer
        self._size = launch.world_size

    def cluster_spec(self) -> ClusterSpec:
        """One worker for each rank."""
        address = launch_env.master_address()
        first = f"{address[0]}:{address[1]}" if address else "rank-0"
        return ClusterSpec({"worker": [first, *(f"rank-{rank}" for rank in range(1, self._size))]})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task, by default worker 0's, where the workers meet; see ``ClusterResolver``."""
        if task_type is None and task_id is None:
            task_type, task_id = "worker", 0
        return self._own_master(task_type, task_id, rpc_layer)
