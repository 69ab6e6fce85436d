"""``SimpleClusterResolver``: keeps what it is given."""

from __future__ import annotations

from typing import Any

from tfstyle_dist.cluster_resolver.base import ClusterResolver, format_master_url
from tfstyle_dist.cluster_resolver.cluster_spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """A cluster that the program writes down (``tf.distribute.cluster_resolver.SimpleClusterResolver``).

    Args:
        cluster_spec: a ``ClusterSpec``.
        master: what ``master()`` returns when it is not asked for a task.
        task_type: this process's job.
        task_id: this process's index in its job.
        environment: returned as it is.
        num_accelerators: returned as it is, e.g. ``{"GPU": 8}``.
        rpc_layer: prefix of the addresses that ``master`` returns.

    Raises:
        TypeError: ``cluster_spec`` is no ``ClusterSpec``, or ``master`` no string.

    Example:
        >>> spec = ClusterSpec({"worker": ["host0:2222", "host1:2222"]})
        >>> SimpleClusterResolver(spec, task_type="worker", task_id=1).master("worker", 1)
        'host1:2222'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"cluster_spec must be a ClusterSpec, got {type(cluster_spec).__name__}; write "
                "ClusterSpec({'worker': ['host0:2222']})."
            )
        if not isinstance(master, str):
            raise TypeError(f"master must be a string, got {type(master).__name__}.")
        self._cluster_spec, self._master = cluster_spec, master
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer
        self._environment, self._num_accelerators = environment, num_accelerators

    def cluster_spec(self) -> ClusterSpec:
        """The spec it was given."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task, else the ``master`` it was given; see ``ClusterResolver``."""
        master = self._master
        if task_type is not None and task_id is not None:
            master = self._cluster_spec.task_address(task_type, task_id)
        return format_master_url(master, rpc_layer or self._rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The mapping it was given, else ``{}``."""
        return {} if self._num_accelerators is None else self._num_accelerators

    @property
    def environment(self) -> str | None:
        """The text it was given."""
        return self._environment
