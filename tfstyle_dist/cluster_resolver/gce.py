"""``GCEClusterResolver``: the machines of a Google Compute Engine instance group. Untested: see docs/status.md."""

from __future__ import annotations

from typing import Any

from tfstyle_dist.cluster_resolver.base import ClusterResolver
from tfstyle_dist.cluster_resolver.cluster_spec import ClusterSpec


class GCEClusterResolver(ClusterResolver):
    """The running machines of an instance group (``tf.distribute.cluster_resolver.GCEClusterResolver``).

    Args:
        project: Google Cloud project.
        zone: zone of the group.
        instance_group: its name.
        port: the port of every task.
        task_type: the job that the machines make up.
        task_id: this machine's index; machines are numbered by address, as text.
        rpc_layer: prefix of the addresses that ``master`` returns.
        credentials: ``"default"`` for the machine's own, or a credentials object.
        service: a ``googleapiclient`` service for ``compute v1`` to use instead of a new one.

    Raises:
        ImportError: ``google-api-python-client`` is not installed and there is no ``service``.

    Example:
        >>> resolver = GCEClusterResolver("my-project", "us-west1-a", "trainers", 8470, task_id=0)
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        self._project, self._zone, self._group, self._port = project, zone, instance_group, port
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer
        self._service = _service(credentials) if service is None else service

    def cluster_spec(self) -> ClusterSpec:
        """The machines that run now.

        Raises:
            RuntimeError: an answer of the service lacks a machine's name or address.
        """
        addresses = []
        groups = self._service.instanceGroups()
        where = {"project": self._project, "zone": self._zone}
        running = {"instanceState": "RUNNING"}
        request = groups.listInstances(**where, instanceGroup=self._group, body=running, orderBy="name")
        while request is not None:
            response = request.execute()
            for item in _part(response, "items", otherwise=[]):
                name = str(_part(item, "instance")).rpartition("/")[2]
                details = self._service.instances().get(**where, instance=name).execute()
                addresses.append(f"{_part(details, 'networkInterfaces', 0, 'networkIP')}:{self._port}")
            request = groups.listInstances_next(previous_request=request, previous_response=response)
        return ClusterSpec({str(self._task_type): sorted(addresses)})

    @property
    def task_type(self) -> str | None:
        """The job given; it cannot be changed."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            "You cannot reset the task_type of the GCEClusterResolver after it has been created; make a new one."
        )

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task, by default this machine's; see ``ClusterResolver``."""
        return self._own_master(task_type, task_id, rpc_layer)


def _part(answer: Any, *path: str | int, otherwise: Any = None) -> Any:
    """What is inside of an answer; ``otherwise``, if that is not ``None``, where its last part is left out."""
    found = answer
    for step in path:
        if isinstance(found, dict) and step not in found and otherwise is not None:
            return otherwise
        if isinstance(step, int):
            there = isinstance(found, list) and step < len(found)
        else:
            there = isinstance(found, dict) and step in found
        if not there:
            raise RuntimeError(f"Compute Engine's answer has no {'/'.join(map(str, path))}: {str(answer)[:200]}")
        found = found[step]
    wanted = str if otherwise is None else type(otherwise)
    if not isinstance(found, wanted) or (wanted is str and not found):
        raise RuntimeError(f"Compute Engine's answer has no {'/'.join(map(str, path))}: {str(answer)[:200]}")
    return found


def _service(credentials: Any) -> Any:
    try:
        from googleapiclient import discovery
    except ImportError:
        raise ImportError(
            "googleapiclient must be installed before using GCEClusterResolver: pip install google-api-python-client "
            "(the extra 'gce' of tfstyle_dist)."
        ) from None
    # Without credentials the client looks for the machine's own.
    return discovery.build("compute", "v1", credentials=None if credentials == "default" else credentials)
