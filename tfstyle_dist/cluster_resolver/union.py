"""``UnionResolver``: several resolvers as one."""

from __future__ import annotations

from typing import Any

from tfstyle_dist.cluster_resolver.base import ClusterResolver, format_master_url
from tfstyle_dist.cluster_resolver.cluster_spec import ClusterSpec


class UnionResolver(ClusterResolver):
    """Merges the clusters of several resolvers (``tf.distribute.cluster_resolver.UnionResolver``).

    Jobs are merged in order. Where all resolvers give a job as a list, the lists are joined; where one leaves indices
    out, the tasks are merged by index. The process's own task is that of the first resolver unless it is given here.
    A ``task_id`` of 0 counts as not given, as in TensorFlow: give it to the first resolver.

    Args:
        *args: the resolvers, at least one.
        **kwargs: ``rpc_layer``, ``task_type`` and ``task_id``, which replace those of the first resolver; a number
            above 0.

    Raises:
        TypeError: an argument is no ``ClusterResolver``.
        ValueError: there is no resolver, or another keyword.

    Example:
        >>> workers = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0)
        >>> servers = SimpleClusterResolver(ClusterSpec({"ps": ["b:2"]}))
        >>> UnionResolver(workers, servers).cluster_spec().as_dict()
        {'worker': ['a:1'], 'ps': ['b:2']}
    """

    def __init__(self, *args: ClusterResolver, **kwargs: Any) -> None:
        self._rpc_layer = kwargs.pop("rpc_layer", None)
        self._task_type = kwargs.pop("task_type", None)
        self._task_id = kwargs.pop("task_id", None)
        if kwargs:
            raise ValueError(f"UnionResolver takes rpc_layer, task_type and task_id, got {sorted(kwargs)}.")
        if not args:
            raise ValueError("At least one ClusterResolver is required; write UnionResolver(resolver, ...).")
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"All arguments of UnionResolver must be ClusterResolvers, got {resolver!r}.")
        self._resolvers = args

    def cluster_spec(self) -> ClusterSpec:
        """The merged cluster.

        Raises:
            KeyError: two resolvers give the same index of a job whose tasks are merged by index.
        """
        parts = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        merged: dict[str, Any] = {}
        for job in dict.fromkeys(job for part in parts for job in part):
            pieces = [part[job] for part in parts if job in part]
            if all(isinstance(piece, list) for piece in pieces):
                merged[job] = [address for piece in pieces for address in piece]
            else:
                merged[job] = _by_index(job, pieces)
        return ClusterSpec(merged)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task of the merged cluster, else what the first resolver says; see ``ClusterResolver``."""
        if task_type is not None and task_id is not None:
            return format_master_url(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self._rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """What the first resolver says."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def task_type(self) -> str | None:
        """The job given, else the first resolver's."""
        return self._task_type or self._resolvers[0].task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index given, if it is not 0; else the first resolver's."""
        return self._task_id or self._resolvers[0].task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The prefix given, else the first resolver's."""
        return self._rpc_layer or self._resolvers[0].rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """What the first resolver says."""
        return self._resolvers[0].environment


def _by_index(job: str, pieces: list[Any]) -> dict[int, str]:
    """One job's tasks merged by index."""
    tasks: dict[int, str] = {}
    for piece in pieces:
        numbered = dict(enumerate(piece)) if isinstance(piece, list) else piece
        twice = sorted(tasks.keys() & numbered.keys())
        if twice:
            raise KeyError(f"Duplicate keys detected when merging two ClusterSpecs: task(s) {twice} of job {job!r}.")
        tasks.update(numbered)
    return tasks
