"""How XLA devices are shared out among the replicas of ``TPUStrategy``, and whether there are any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tfstyle_dist.cluster_resolver import ClusterResolver
from tfstyle_dist.comm.xla.xla_adapter import XlaAdapter, require_torch_xla


class DeviceAssignmentLike(Protocol):
    """What is asked of ``experimental_device_assignment``."""

    @property
    def num_replicas(self) -> int:
        """Over how many devices the batch is divided."""

    @property
    def num_cores_per_replica(self) -> int:
        """Over how many devices the model is divided."""


@dataclass(frozen=True)
class DeviceAssignment:
    """A grid of XLA devices: ``num_replicas`` divide the batch, ``num_cores_per_replica`` the model.

    Torch_xla lays out the devices itself, so there is no topology to be given as in TensorFlow's class of this name.

    Example:
        >>> TPUStrategy(experimental_device_assignment=DeviceAssignment(2, 2), use_spmd=True)
        <TPUStrategy, one program over 4 XLA devices (2 x 2)>
    """

    num_replicas: int
    num_cores_per_replica: int = 1


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Checks that there is what ``TPUStrategy`` needs; torch_xla initialises the devices when they are first used.

    Nothing is returned: torch_xla knows the topology itself.

    Args:
        cluster_resolver: the slice, or ``None``: this host's.

    Raises:
        ImportError: torch_xla is absent, or is made for another torch.
        TypeError: ``cluster_resolver`` is something else.

    Example:
        >>> initialize_tpu_system(TPUClusterResolver())
        >>> strategy = TPUStrategy()

    Source: ``tf.tpu.experimental.initialize_tpu_system``.
    """
    if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
        raise TypeError(
            f"cluster_resolver must be a ClusterResolver, such as TPUClusterResolver(), or None, got "
            f"{type(cluster_resolver).__name__}: {cluster_resolver!r}."
        )
    require_torch_xla()


def logical_shape(adapter: XlaAdapter, assignment: DeviceAssignmentLike | None) -> tuple[int, int]:
    """Over how many devices the batch, and over how many the model, is divided."""
    if assignment is None:
        return adapter.num_devices, 1
    shape = (assignment.num_replicas, assignment.num_cores_per_replica)
    if shape[1] > 1 and not adapter.spmd:
        raise ValueError(
            f"experimental_device_assignment asks for {shape[1]} devices in a replica, which needs use_spmd=True."
        )
    if shape[0] * shape[1] != adapter.num_devices:
        raise ValueError(
            f"experimental_device_assignment names {shape[0]} x {shape[1]} devices, but there are "
            f"{adapter.num_devices}."
        )
    return shape
