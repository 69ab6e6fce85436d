"""``ClusterResolver``: what every way to find the cluster has in common."""

from __future__ import annotations

import abc
from typing import Any

from tfstyle_dist.cluster_resolver.cluster_spec import ClusterSpec


def format_master_url(master: str, rpc_layer: str | None = None) -> str:
    """``rpc_layer://master``, or the address alone without a layer."""
    return f"{rpc_layer}://{master}" if rpc_layer else master


class ClusterResolver(abc.ABC):
    """Finds the tasks of a cluster and which of them this process is.

    Source: ``tf.distribute.cluster_resolver.ClusterResolver``. A subclass gives ``cluster_spec`` and ``master``, and
    sets ``_task_type``, ``_task_id`` and ``_rpc_layer`` or overrides their properties.
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The cluster as it is now; asked for anew at each call."""

    @abc.abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task, ``rpc_layer://host:port``.

        Args:
            task_type: job of the task; this process's own by default.
            task_id: its index.
            rpc_layer: replaces the resolver's own prefix.
        """

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """How many accelerators this process sees.

        Args:
            task_type: accepted for TF's signature; only this process can be asked.
            task_id: likewise.
            config_proto: likewise.

        Returns:
            ``{"GPU": n}``, or ``{}`` without one.
        """
        from tfstyle_dist.core.devices import find_local_devices, is_accelerator

        count = sum(is_accelerator(device.type) for device in find_local_devices())
        return {"GPU": count} if count else {}

    @property
    def environment(self) -> str | None:
        """The kind of environment; an empty string where there is nothing to say."""
        return ""

    @property
    def task_type(self) -> str | None:
        """This process's job: ``"chief"``, ``"worker"``, ``"ps"`` or ``"evaluator"``; ``None`` if it is not known."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """This process's index in its job; ``None`` if it is not known."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The prefix that ``master`` puts before an address."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _own_master(self, task_type: str | None, task_id: int | None, rpc_layer: str | None) -> str:
        """The address of the task asked for, else of this process's; ``""`` when neither is known."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return format_master_url(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer)
