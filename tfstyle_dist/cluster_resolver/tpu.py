"""``TPUClusterResolver``: the hosts of a TPU slice. Untested on a TPU: see docs/status.md."""

from __future__ import annotations

import importlib.util
import math
from types import TracebackType
from typing import Any

from tfstyle_dist.cluster_resolver.base import ClusterResolver
from tfstyle_dist.cluster_resolver.cluster_spec import ClusterSpec
from tfstyle_dist.core import launch_env

_PORT = 8470


class TPUClusterResolver(ClusterResolver):
    """The hosts of the TPU slice that this host belongs to (``tf.distribute.cluster_resolver.TPUClusterResolver``).

    A program runs on the TPU hosts themselves; there is nothing to connect to. The hosts are those of
    ``TPU_WORKER_HOSTNAMES``, and this host's number is ``TPU_WORKER_ID``, which the platform sets; without them the
    slice is this host.

    Args:
        tpu: ``None``, ``""`` or ``"local"``: this host's slice; ``"local"`` does not ask whether there is one.
        zone: accepted for TF's signature.
        project: likewise.
        job_name: the job that the hosts make up.
        coordinator_name: likewise.
        coordinator_address: likewise.
        credentials: likewise.
        service: likewise.
        discovery_url: likewise.

    Raises:
        ValueError: ``tpu`` names another slice, or there is no TPU: none of these variables is set, and torch_xla is
            not installed. Programs that go on without a TPU catch this, as in TensorFlow.

    Example:
        >>> TPUClusterResolver("local").cluster_spec().num_tasks("worker")
        1
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> None:
        if tpu not in (None, "", "local"):
            raise ValueError(
                f"tpu={tpu!r}: a program cannot connect to a TPU elsewhere. Start it on every host of the slice and "
                "leave tpu out."
            )
        if tpu != "local" and not launch_env.says_tpu() and importlib.util.find_spec("torch_xla") is None:
            raise ValueError(
                "There is no TPU here: torch_xla is not installed, and TPU_WORKER_HOSTNAMES is not set. Use another "
                "strategy, install torch_xla on a TPU host, or write tpu='local' to name this host all the same."
            )
        self._job_name, self._task_type = job_name, job_name
        self._task_id = launch_env.tpu_worker_id()

    def cluster_spec(self) -> ClusterSpec:
        """One task for each host of the slice."""
        return ClusterSpec({self._job_name: [f"{host}:{_PORT}" for host in launch_env.tpu_hosts()]})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task; ``""`` for this process, which needs no connection."""
        if task_type is None and task_id is None:
            return ""
        return self._own_master(task_type, task_id, rpc_layer)

    def get_master(self) -> str:
        """``master()``."""
        return self.master()

    def get_job_name(self) -> str:
        """The job that the hosts make up."""
        return self._job_name

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """``{"TPU": chips of one host}``, from ``TPU_CHIPS_PER_HOST_BOUNDS``; ``{}`` where it is not set."""
        bounds = launch_env.tpu_chips_per_host()
        return {"TPU": math.prod(bounds)} if bounds else {}

    @staticmethod
    def connect(tpu: str | None = None, zone: str | None = None, project: str | None = None) -> TPUClusterResolver:
        """A resolver for this host's slice; there is nothing to connect to."""
        return TPUClusterResolver(tpu, zone, project)

    def __enter__(self) -> TPUClusterResolver:
        """Returns the resolver."""
        return self

    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing to do."""
