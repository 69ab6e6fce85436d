"""``KubernetesClusterResolver``: the running pods of a Kubernetes cluster, asked for with the official client."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfstyle_dist.cluster_resolver.base import ClusterResolver
from tfstyle_dist.cluster_resolver.cluster_spec import ClusterSpec
from tfstyle_dist.core.logging import warn_once


class KubernetesExecutableLocation(enum.Enum):
    """Where the program runs, which decides where the client finds its credentials.

    Source: ``tf.distribute.cluster_resolver.KubernetesExecutableLocation``.

    * ``WITHIN_CLUSTER``: in a pod; its service account must be allowed to list pods.
    * ``OFF_CLUSTER``: elsewhere, with a kubeconfig file.
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """Pods chosen by labels (``tf.distribute.cluster_resolver.KubernetesClusterResolver``).

    Which pod this process runs in is not found out: set ``task_type`` and ``task_id``, for instance from
    ``JOB_COMPLETION_INDEX`` of an indexed Job. Tasks are numbered by pod name, in which numbers sort as numbers.

    Args:
        job_to_label_mapping: from job to the label selectors of its pods; default
            ``{"worker": ["job-name=tensorflow"]}``.
        tf_server_port: the port of every task.
        rpc_layer: prefix of the addresses that ``master`` returns.
        override_client: a ``kubernetes.client.CoreV1Api`` to use instead of a new one.
        executable_location: where the program runs.

    Raises:
        ImportError: the package ``kubernetes`` is not installed and there is no ``override_client``.
        TypeError: the selectors of a job are no list.
        ValueError: ``executable_location`` is no ``KubernetesExecutableLocation``.

    Example:
        >>> resolver = KubernetesClusterResolver({"worker": ["job-name=train"]})
        >>> resolver.task_type, resolver.task_id = "worker", int(os.environ["JOB_COMPLETION_INDEX"])
        >>> strategy = MultiWorkerMirroredStrategy(resolver)
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
    ) -> None:
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise ValueError(
                "executable_location must be KubernetesExecutableLocation.WITHIN_CLUSTER or OFF_CLUSTER, got "
                f"{executable_location!r}."
            )
        for job, selectors in (job_to_label_mapping or {}).items():
            if isinstance(selectors, str):
                raise TypeError(
                    f"The label selectors of job {job!r} must be a list, got the string {selectors!r}, whose letters "
                    f"would be selectors of their own; write {{{job!r}: [{selectors!r}]}}."
                )
        self._labels = job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        self._port, self._rpc_layer = tf_server_port, rpc_layer
        self._client = _client(executable_location) if override_client is None else override_client

    def cluster_spec(self) -> ClusterSpec:
        """The pods as they are now.

        Raises:
            RuntimeError: a pod does not run yet, or no longer, or has no address yet.
        """
        return ClusterSpec({job: self._pods(selectors) for job, selectors in self._labels.items()})

    def _pods(self, selectors: Sequence[str]) -> list[str]:
        addresses = []
        for selector in selectors:
            found = self._client.list_pod_for_all_namespaces(label_selector=selector).items
            if found is None:
                raise RuntimeError(f"Kubernetes gave no list of the pods of {selector!r}.")
            if not found:  # as in TensorFlow there are no tasks then
                warn_once(
                    f"no pods {selector}",
                    f"Kubernetes has no pods with the labels {selector!r}. Look at the labels of yours: kubectl get "
                    "pods --all-namespaces --show-labels; if these are right, wait until the pods are made.",
                )
            for pod in sorted(found, key=lambda pod: _by_numbers(pod.metadata.name or "")):
                phase = None if pod.status is None else pod.status.phase
                # TensorFlow takes the node's address, which reaches a pod on the host network only; for those the
                # two are the same.
                address = None if pod.status is None else pod.status.pod_ip or pod.status.host_ip
                if phase != "Running" or not address:
                    raise RuntimeError(
                        f"Pod {pod.metadata.name!r} is not running; phase: {phase!r}, address: {address!r}. Wait until "
                        f"all pods of {selector!r} run."
                    )
                addresses.append(f"{address}:{self._port}")
        return addresses

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task, by default this process's if it was set, else ``""``; see ``ClusterResolver``."""
        return self._own_master(task_type, task_id, rpc_layer)


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Sorts ``train-2-x`` before ``train-10-y``: the pods of an indexed Job by their index."""
    return [(int(part) if part.isdecimal() else 0, part) for part in re.split(r"([0-9]+)", name)]


def _client(location: KubernetesExecutableLocation) -> Any:
    try:
        from kubernetes import client, config
    except ImportError:
        raise ImportError(
            "The Kubernetes Python client must be installed before using KubernetesClusterResolver: "
            "pip install kubernetes (the extra 'kubernetes' of tfstyle_dist)."
        ) from None
    if location is KubernetesExecutableLocation.WITHIN_CLUSTER:
        config.load_incluster_config()
    else:
        config.load_kube_config()
    return client.CoreV1Api()
