"""``TFConfigClusterResolver``: the cluster in the environment variable ``TF_CONFIG``."""

from __future__ import annotations

import json
from typing import Any

from tfstyle_dist.cluster_resolver.base import ClusterResolver, format_master_url
from tfstyle_dist.cluster_resolver.cluster_spec import ClusterSpec
from tfstyle_dist.core import json_text, launch_env

KEYS = ("cluster", "task", "rpc_layer", "session_master")
EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


def load_tf_config() -> dict[str, Any]:
    """What ``TF_CONFIG`` holds; ``{}`` when it is not set or, as in TensorFlow, holds a list or a word.

    Raises:
        json.JSONDecodeError: it is not JSON.
        TypeError: it is null, a number, true or false, or an object that was made into a string twice.
    """
    text = launch_env.tf_config()
    if text is None:
        return {}
    try:
        config = json_text.parse(text)
    except ValueError as error:
        why, place = (error.msg, error.pos) if isinstance(error, json.JSONDecodeError) else (error, 0)
        raise json.JSONDecodeError(
            f"TF_CONFIG is not JSON ({why}); write e.g. {EXAMPLE}, or unset it. It holds {text[:200]!r}", text, place
        ) from None
    if isinstance(config, dict):
        return config
    if isinstance(config, list) or (isinstance(config, str) and not any(key in config for key in KEYS)):
        return {}
    raise TypeError(
        f"TF_CONFIG must hold a JSON object, got {text[:200]!r}, which is {type(config).__name__} in Python; write "
        f"e.g. {EXAMPLE}, or unset it. json.dumps makes the text from a dictionary, called once."
    )


def missing_cluster() -> str | None:
    """What to say of a ``TF_CONFIG`` that has a task and no cluster, e.g. by a misspelt key; else ``None``."""
    config = load_tf_config()
    if "task" not in config or "cluster" in config:
        return None
    return (
        f'TF_CONFIG has a "task" and no "cluster", only the keys {sorted(config)}, so this process trains alone; write '
        f"e.g. {EXAMPLE}, or unset it."
    )


class TFConfigClusterResolver(ClusterResolver):
    """Reads ``TF_CONFIG`` at every access (``tf.distribute.cluster_resolver.TFConfigClusterResolver``).

    ``TF_CONFIG`` is JSON: ``{"cluster": {job: [address, ...]}, "task": {"type": job, "index": number}}``; ``rpc_layer``
    and ``session_master`` are understood too. Without the variable the cluster is empty.

    Args:
        task_type: replaces the job of ``TF_CONFIG``.
        task_id: replaces the index.
        rpc_layer: replaces the prefix of addresses.
        environment: returned as it is.

    Raises:
        json.JSONDecodeError: (by an access, not here) the variable is not JSON.
        TypeError: (likewise) it is null, a number, true or false.

    Example:
        >>> TFConfigClusterResolver(task_type="worker", task_id=0).task_type
        'worker'
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer
        self._environment = environment

    @staticmethod
    def _task() -> dict[str, Any]:
        task = load_tf_config().get("task", {})
        if not isinstance(task, dict):
            raise ValueError(f'"task" in TF_CONFIG must be an object, got {task!r}; write e.g. {EXAMPLE}.')
        return task

    @property
    def task_type(self) -> str | None:
        """The job given, else that of ``TF_CONFIG``."""
        if self._task_type is not None:
            return str(self._task_type)
        task = self._task()
        return str(task["type"]) if "type" in task else None

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index given, else that of ``TF_CONFIG``; a string of digits counts as a number.

        Raises:
            ValueError: it is no whole number.
        """
        if self._task_id is not None:
            return int(self._task_id)
        task = self._task()
        if "index" not in task:
            return None
        index = task["index"]
        try:
            if not isinstance(index, float) or index.is_integer():
                return int(index)
        except (TypeError, ValueError):
            pass
        raise ValueError(f'"index" in TF_CONFIG must be a whole number, got {index!r}; write e.g. {EXAMPLE}.')

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The prefix given, else that of ``TF_CONFIG``."""
        if self._rpc_layer is not None:
            return self._rpc_layer
        layer: str | None = load_tf_config().get("rpc_layer")
        return layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """The text it was given."""
        return self._environment

    def cluster_spec(self) -> ClusterSpec:
        """The cluster of ``TF_CONFIG``; an empty one if there is none.

        Raises:
            json.JSONDecodeError: the variable is not JSON.
            TypeError: it holds no object, or its cluster does not map jobs to addresses.
        """
        return ClusterSpec(load_tf_config().get("cluster", {}))

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task, by default this process's; ``""`` in a cluster of at most one task.

        Raises:
            ValueError: there is no such job or task.
        """
        session_master: str | None = load_tf_config().get("session_master")
        if session_master is not None:
            return session_master
        spec = self.cluster_spec()
        if sum(spec.num_tasks(job) for job in spec.jobs) <= 1:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        # As in TensorFlow, an unknown own task is looked up and not found.
        address = spec.task_address(task_type, task_id)  # type: ignore[arg-type]
        return format_master_url(address, rpc_layer or self.rpc_layer)
