"""Roles: which tasks train together, in which order, and which one is the chief."""

from __future__ import annotations

from dataclasses import dataclass

from tfstyle_dist.cluster_resolver.base import ClusterResolver
from tfstyle_dist.cluster_resolver.cluster_spec import ClusterSpec
from tfstyle_dist.cluster_resolver.tf_config import TFConfigClusterResolver, missing_cluster
from tfstyle_dist.core.logging import warn_once

TASK_TYPES = ("chief", "worker", "ps", "evaluator")


@dataclass(frozen=True)
class Task:
    """One task of a cluster.

    Attributes:
        type: its job.
        index: its number in the job.
        address: ``host:port``, as the cluster spec has it.
    """

    type: str
    index: int
    address: str

    def __str__(self) -> str:
        return f"{self.type} {self.index} ({self.address})"


def check(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    """Checks what a strategy needs of a cluster: known roles, a task that exists, each address once.

    Raises:
        ValueError: something is wrong; the message says what.
    """
    unknown = [job for job in spec.jobs if job not in TASK_TYPES]
    if unknown:
        raise ValueError(
            f"Disallowed task type found in cluster spec: {unknown}. Allowed types are {TASK_TYPES} and the cluster "
            f"spec is {spec.as_dict()}."
        )
    if task_type not in (*TASK_TYPES, None):
        raise ValueError(
            f"Unrecognized task_type: {task_type!r}, valid task types are: {TASK_TYPES}; write one of them."
        )
    for job in ("chief", "evaluator"):
        if job in spec.jobs and spec.num_tasks(job) > 1:
            raise ValueError(f"There must be at most one {job!r} job, got {spec.job_tasks(job)}.")
    seen: dict[str, str] = {}
    for task in tasks(spec):
        if task.index < 0:
            raise ValueError(
                f"The cluster spec has the task {task} with a negative index; write indices from 0, or a list of "
                "addresses, which counts by itself."
            )
        if task.address in seen:
            raise ValueError(
                f"Address {task.address} is given to both {seen[task.address]} and {task.type} {task.index}; each "
                "task needs its own host:port."
            )
        seen[task.address] = f"{task.type} {task.index}"
    if not spec or task_type is None:
        return
    # An evaluator need not be listed: it works by itself.
    if task_type not in spec.jobs:
        if task_type == "evaluator":
            return
        raise ValueError(
            f"`task_type` {task_type!r} not found in cluster_spec, which has {spec.jobs}; list its address."
        )
    if task_id is None:
        raise ValueError(f"The task's index is missing: write {{'type': {task_type!r}, 'index': 0}} or set task_id.")
    indices = spec.task_indices(task_type)
    if task_id not in indices:
        raise ValueError(
            f"The `task_id` {task_id} exceeds the maximum id of {task_type}: the cluster has {task_type} {indices}. "
            "Indices count from 0."
        )


def tasks(spec: ClusterSpec, *jobs: str) -> list[Task]:
    """The tasks of some jobs, or of all, in order."""
    return [
        Task(job, index, spec.task_address(job, index))
        for job in (jobs or spec.jobs)
        if job in spec.jobs
        for index in spec.task_indices(job)
    ]


def training_tasks(resolver: ClusterResolver) -> tuple[list[Task], int]:
    """The tasks that train together, the chief first, and which of them this process is.

    An evaluator trains with nobody: it is alone in its list. So is a process without a cluster; of one that
    ``TF_CONFIG`` gives a task and no cluster it is said once.

    Raises:
        ValueError: the cluster or the task is wrong, or this process is a parameter server.
    """
    spec, task_type, task_id = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    check(spec, task_type, task_id)
    asked = isinstance(resolver, TFConfigClusterResolver) and task_type != "evaluator"
    if asked and (trouble := missing_cluster()):
        warn_once("TF_CONFIG without a cluster", trouble)
    if not spec or task_type == "evaluator":
        return [Task(task_type or "worker", task_id or 0, "")], 0
    members = tasks(spec, "chief", "worker")
    if task_type is None:
        if len(members) == 1:
            return members, 0
        raise ValueError(
            f"The cluster has {len(members)} training tasks, but which one this process is, is not said: give the "
            "resolver task_type and task_id, or TF_CONFIG a task."
        )
    if task_type == "ps":
        raise ValueError(
            f"Unexpected `task_type` 'ps': parameter servers do not train. Run a server in task ps {task_id}, or "
            "leave ps out of the cluster."
        )
    return members, [(task.type, task.index) for task in members].index((task_type, task_id or 0))


def is_chief(resolver: ClusterResolver | None) -> bool:
    """Whether this process writes files and logs for all: the chief, else worker 0; also without a cluster.

    An evaluator counts as the chief of its own cluster.
    """
    if resolver is None or not (spec := resolver.cluster_spec()):
        return True
    if resolver.task_type in ("chief", "evaluator", None):
        return True
    return "chief" not in spec.jobs and resolver.task_type == "worker" and resolver.task_id == 0
