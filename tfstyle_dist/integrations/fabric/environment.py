"""``TF_CONFIG`` as a cluster environment of Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfstyle_dist.cluster_resolver import TFConfigClusterResolver, roles
from tfstyle_dist.core import launch_env, network
from tfstyle_dist.integrations.fabric.upstream import ClusterEnvironment

if TYPE_CHECKING:
    from tfstyle_dist.integrations.fabric.fabric_strategy import TfdFabricStrategy


class TFConfigEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """Tells Fabric the training tasks of ``TF_CONFIG``; made by ``TfdFabricStrategy``.

    Fabric counts processes by nodes of ``devices`` each, and so are the tasks counted here.

    Args:
        strategy: says how many devices a node has.

    Raises:
        ValueError: the cluster or the task is wrong, or this process is a parameter server.
    """

    def __init__(self, strategy: TfdFabricStrategy) -> None:
        tasks, self._rank = roles.training_tasks(TFConfigClusterResolver())
        self._addresses = [task.address for task in tasks]
        self._strategy = strategy

    @property
    def creates_processes_externally(self) -> bool:
        """Always: each task was started with its own ``TF_CONFIG``."""
        return True

    @property
    def main_address(self) -> str:
        """The host of the first task."""
        return network.parse_address(self._addresses[0])[0]

    @property
    def main_port(self) -> int:
        """The port of the first task."""
        return network.parse_address(self._addresses[0])[1]

    @staticmethod
    def detect() -> bool:
        """Whether ``TF_CONFIG`` alone says who the processes are."""
        return launch_env.launch() is None and bool(TFConfigClusterResolver().cluster_spec())

    def world_size(self) -> int:
        """The number of training tasks."""
        return len(self._addresses)

    def set_world_size(self, size: int) -> None:
        """Nothing: the cluster says it."""

    def global_rank(self) -> int:
        """This task's number among them, the chief first."""
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the task says it."""

    def local_rank(self) -> int:
        """This task's number in its node."""
        return self._rank % self._processes_of_a_node()

    def node_rank(self) -> int:
        """The node's number."""
        return self._rank // self._processes_of_a_node()

    def _processes_of_a_node(self) -> int:
        return max(int(self._strategy.num_processes), 1)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuses other numbers than the cluster's.

        Args:
            num_devices: of each node.
            num_nodes: of the job.

        Raises:
            ValueError: they are not as many as the tasks.
        """
        count = self.world_size()
        if num_devices * num_nodes != count:
            raise ValueError(
                f"TF_CONFIG has {count} training task(s), but Fabric was told devices={num_devices} and "
                f"num_nodes={num_nodes}, which is {num_devices * num_nodes}. Write Fabric(devices={count}) for tasks "
                f"on one host, or Fabric(devices=1, num_nodes={count}) for one task on each of {count} hosts."
            )
