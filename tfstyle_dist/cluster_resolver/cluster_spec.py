"""``tf.train.ClusterSpec``: the tasks of a cluster and their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MOST_TASKS = 1 << 20
"""Task indices are below this number."""


class ClusterSpec:
    """Jobs, their tasks and where each task listens (``tf.train.ClusterSpec``).

    Args:
        cluster: a mapping from job name to a list of addresses ``"host:port"``, or to a mapping from task index to
            address; or another ``ClusterSpec``. A host name may be anything the network resolves.

    Raises:
        TypeError: ``cluster`` is of another type, or a job name or an address is not a string.
        ValueError: a task index is no whole number, is not below ``MOST_TASKS``, or is given twice. A negative one is
            kept, as in TensorFlow; strategies refuse it.

    Example:
        >>> spec = ClusterSpec({"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"]})
        >>> spec.task_address("worker", 1)
        'host2:2222'
    """

    _tasks: dict[str, dict[int, str]]

    def __init__(self, cluster: Mapping[str, Sequence[str] | Mapping[int, str]] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            self._tasks = {job: dict(tasks) for job, tasks in cluster._tasks.items()}
            return
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "`cluster` must be a dictionary mapping one or more job names to lists of network addresses, or a "
                f"ClusterSpec, got {type(cluster).__name__}: {cluster!r}. Write e.g. "
                "ClusterSpec({'worker': ['host0:2222', 'host1:2222']})."
            )
        self._tasks = {job: _tasks_of(job, tasks) for job, tasks in cluster.items()}

    def __bool__(self) -> bool:
        """Whether there is any job."""
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        """Equal to a spec of the same tasks, and to a mapping from job to a mapping from index to address."""
        return self._tasks == (other._tasks if isinstance(other, ClusterSpec) else other)

    def __ne__(self, other: object) -> bool:
        """Not ``==``."""
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # equality with a dict leaves no hash to share

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))!r})"

    @property
    def jobs(self) -> list[str]:
        """The job names."""
        return list(self._tasks)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """A mapping from job to its addresses: a list, or a mapping by index where indices are left out."""
        return {job: self._plain(tasks) for job, tasks in self._tasks.items()}

    def _plain(self, tasks: dict[int, str]) -> list[str] | dict[int, str]:
        if tasks and tasks.keys() == set(range(len(tasks))):
            return [tasks[index] for index in range(len(tasks))]
        return {index: tasks[index] for index in sorted(tasks)}

    def num_tasks(self, job_name: str) -> int:
        """How many tasks a job has.

        Args:
            job_name: one of ``jobs``.

        Raises:
            ValueError: there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The indices of a job's tasks, in order.

        Args:
            job_name: one of ``jobs``.

        Raises:
            ValueError: there is no such job.
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of one task, ``"host:port"``.

        Args:
            job_name: one of ``jobs``.
            task_index: one of ``task_indices(job_name)``.

        Raises:
            ValueError: there is no such job or task.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"No task with index {task_index!r} in job {job_name!r}; it has {sorted(tasks)}. Ask for one of these."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job by task index; ``None`` where an index is left out.

        Args:
            job_name: one of ``jobs``.

        Raises:
            ValueError: there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._tasks:
            raise ValueError(f"No such job in cluster: {job_name!r}; it has {self.jobs}. Ask for one of these.")
        return self._tasks[job_name]


def _tasks_of(job: Any, tasks: Any) -> dict[int, str]:
    """One job's tasks by index, checked."""
    if not isinstance(job, str):
        raise TypeError(f"A job name must be a string, got {type(job).__name__}: {job!r}.")
    if isinstance(tasks, list | tuple):
        numbered: dict[int, Any] = dict(enumerate(tasks))
    elif isinstance(tasks, Mapping):
        try:
            numbered = {int(index): address for index, address in tasks.items()}
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"Task indices of {job!r} are whole numbers, got {list(tasks)}.") from None
        if len(numbered) < len(tasks) or not all(abs(index) < MOST_TASKS for index in numbered):
            raise ValueError(f"Task indices of {job!r} are different numbers below {MOST_TASKS}, got {list(tasks)}.")
    else:
        raise TypeError(
            f"The tasks for job {job!r} must be a list or a dictionary from integers to strings, got {tasks!r}."
        )
    for index, address in numbered.items():
        if not isinstance(address, str):
            raise TypeError(f"The address of task {index} of {job!r} must be a string 'host:port', got {address!r}.")
    return numbered
