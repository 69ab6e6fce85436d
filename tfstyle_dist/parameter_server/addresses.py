"""What a parameter server cluster must look like, and what its addresses mean."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from tfstyle_dist.core.errors import InvalidArgumentError

JOBS = ("chief", "evaluator", "ps", "worker")


def cluster_of(resolver: Any) -> dict[str, list[str]]:
    """The addresses of a resolver's cluster by job.

    Raises:
        TypeError: it is no resolver.
    """
    if not callable(getattr(resolver, "cluster_spec", None)):
        raise TypeError(
            f"cluster_resolver must have a method cluster_spec(), got {resolver!r}. Write e.g. "
            "cluster_resolver.SimpleClusterResolver(ClusterSpec({'worker': [...], 'ps': [...]}), task_type='chief')."
        )
    spec = resolver.cluster_spec()
    return as_addresses(spec.as_dict() if hasattr(spec, "as_dict") else spec)


def as_addresses(cluster: Mapping[str, Any]) -> dict[str, list[str]]:
    """A cluster with each job as a list of addresses.

    Raises:
        ValueError: a job that names only some of its tasks.
    """
    result = {}
    for job, tasks in cluster.items():
        if isinstance(tasks, Mapping):
            if sorted(int(index) for index in tasks) != list(range(len(tasks))):
                raise ValueError(
                    f"Job {job!r} has tasks {sorted(tasks)}; a parameter server cluster needs all from 0 on."
                )
            tasks = [tasks[index] for index in sorted(tasks, key=int)]
        result[job] = [str(address) for address in ([tasks] if isinstance(tasks, str) else tasks)]
    return result


def host_and_port(address: str) -> tuple[str, str]:
    """The two parts of the address of a task; port 0 stands for a free one.

    Raises:
        InvalidArgumentError: there is no port, or it is no number up to 65535.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InvalidArgumentError(
            f"Address {address!r} of a task has no port that one could listen at or connect to: write 'host:port' with "
            "a number up to 65535, e.g. 'localhost:2222'."
        )
    return host, port


def check_cluster(cluster: Mapping[str, Sequence[str]], task: str | None = None) -> None:
    """Refuses a cluster that cannot train.

    Args:
        cluster: the addresses of each job.
        task: the job of this process, where its resolver knows it: the coordinator's, not one that waits for it.

    Raises:
        ValueError: no worker, no ps, several chiefs, an unknown job, an address without a port, or a process that is
            to serve.
    """
    _check_leads(task)
    unknown = sorted(set(cluster) - set(JOBS))
    if unknown:
        raise ValueError(f"Disallowed job names {unknown} in the cluster; the jobs are {', '.join(JOBS)}.")
    if not cluster.get("worker"):
        raise ValueError("The cluster must have at least one worker; add a job 'worker' with its addresses.")
    if not cluster.get("ps"):
        raise ValueError("The cluster must have at least one ps; add a job 'ps' with its addresses.")
    if len(cluster.get("chief", ())) > 1:
        raise ValueError(f"The cluster can have at most one chief, got {list(cluster['chief'])}.")
    for address in (*cluster["worker"], *cluster["ps"]):
        host_and_port(address)


def _check_leads(task: str | None) -> None:
    if task in ("worker", "ps"):
        raise ValueError(
            f"This process is a task of the job {task!r}, but ParameterServerStrategy belongs to the coordinator (the "
            "chief). Let it serve instead: if resolver.task_type in ('worker', 'ps'): Server(resolver.cluster_spec(), "
            "job_name=resolver.task_type, task_index=resolver.task_id).join()"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host in ("localhost", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bindable(host: str) -> str:
    """The name of an interface to listen at."""
    return "127.0.0.1" if host == "localhost" else host
