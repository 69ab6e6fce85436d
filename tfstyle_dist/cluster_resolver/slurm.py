"""``SlurmClusterResolver``: the tasks of a SLURM job step."""

from __future__ import annotations

import re
import sys

from tfstyle_dist.cluster_resolver.base import ClusterResolver
from tfstyle_dist.cluster_resolver.cluster_spec import MOST_TASKS, ClusterSpec
from tfstyle_dist.core import launch_env

_PIECE = r"[^\[\],\s]+|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]"
_HOST_LIST = re.compile(rf"(?:{_PIECE})+(?:,(?:{_PIECE})+)*")
_HOSTS = re.compile(r"(?:[^\[\],]|\[[^\]]*\])+")
_PIECES = re.compile(r"([^\[\]]+)|\[([^\]]+)\]")


def expand_hostlist(text: str) -> list[str]:
    """The host names of a SLURM node list, in its order.

    Args:
        text: e.g. ``"n[1-2,7],login,r[1-2]n[01-02]"``; zeros at the left of a number are kept.

    Raises:
        ValueError: brackets do not match, a range is not numeric, or a host is named twice.

    Example:
        >>> expand_hostlist("n[1-2],m5")
        ['n1', 'n2', 'm5']
    """
    if not _HOST_LIST.fullmatch(text):
        raise ValueError(f"SLURM node list {_shown(text)} cannot be read; expected a form such as 'n[1-3],m5'.")
    hosts: dict[str, None] = {}
    for name in _HOSTS.findall(text):
        found = [""]
        for plain, ranges in _PIECES.findall(name):
            ends = [plain] if plain else [number for part in ranges.split(",") for number in _numbers(part, text)]
            if len(found) * len(ends) + len(hosts) > MOST_TASKS:
                raise ValueError(f"SLURM node list {_shown(text)} names more than {MOST_TASKS} hosts.")
            found = [start + end for start in found for end in ends]
        if repeated := [host for host in found if host in hosts]:
            raise ValueError(f"SLURM node list {_shown(text)} names {repeated[0]!r} twice.")
        hosts |= dict.fromkeys(found)
    return list(hosts)


def _numbers(part: str, text: str) -> list[str]:
    low, dash, high = part.partition("-")
    if not dash:
        return [low]
    first, last = _whole(low), _whole(high)
    if not first <= last < first + MOST_TASKS:
        raise ValueError(
            f"SLURM node list {_shown(text)} cannot be read: {part!r} is no range of at most {MOST_TASKS} numbers."
        )
    return [str(number).zfill(len(low)) for number in range(first, last + 1)]


def _whole(digits: str) -> int:
    """A number of digits; one of too many for any real number of nodes or tasks counts as endless."""
    return int(digits) if len(digits) <= 18 else sys.maxsize


def _shown(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}...")


def expand_tasks_per_node(text: str) -> list[int]:
    """The numbers of tasks of ``SLURM_STEP_TASKS_PER_NODE``, e.g. ``"2(x3),1"`` is ``[2, 2, 2, 1]``.

    Raises:
        ValueError: the text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        times = 0 if match is None else _whole(match[2] or "1")
        if match is None or len(counts) + times > MOST_TASKS or _whole(match[1]) > MOST_TASKS:
            raise ValueError(
                f"SLURM_STEP_TASKS_PER_NODE={_shown(text)} cannot be read; expected a form such as '2(x3),1', with at "
                f"most {MOST_TASKS} nodes and tasks."
            )
        counts += [int(match[1])] * times
    return counts


class SlurmClusterResolver(ClusterResolver):
    """The tasks of a SLURM job step (``tf.distribute.cluster_resolver.SlurmClusterResolver``).

    To be used in a process that ``srun`` started. Tasks are numbered as SLURM does by default: all of the first node,
    then all of the second. A task's port is ``port_base`` plus its place on the node.

    Args:
        jobs: mapping from job to its number of tasks; default: all tasks are workers. Ranks are dealt to the jobs in
            alphabetical order.
        port_base: the first port on each node.
        gpus_per_node: GPUs of each node, a whole number; default: those that this process sees.
        gpus_per_task: GPUs of each task, a whole number; default: ``gpus_per_node`` shared out evenly.
        tasks_per_node: number of tasks on each node, or a mapping from host name; default: what SLURM says.
        auto_set_gpu: ``cluster_spec`` sets ``CUDA_VISIBLE_DEVICES`` to this task's GPUs.
        rpc_layer: prefix of the addresses that ``master`` returns.

    Raises:
        RuntimeError: not in a SLURM step, the tasks of ``jobs`` are not those of the step, or too many GPUs.
        TypeError: a number of GPUs or of tasks, or ``port_base``, is no whole number, or ``jobs`` no dictionary.
        ValueError: a number of tasks is negative, or a task's port would be none.

    Example:
        >>> resolver = SlurmClusterResolver({"worker": 4})  # under srun --ntasks=4
        >>> strategy = MultiWorkerMirroredStrategy(resolver)
    """

    def __init__(
        self,
        jobs: dict[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | dict[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
    ) -> None:
        self._rank = _slurm_number("PROCID")
        self._jobs = {"worker": _slurm_number("STEP_NUM_TASKS")} if jobs is None else _checked("jobs", "worker", jobs)
        self._port_base, self._auto_set_gpu, self._rpc_layer = port_base, auto_set_gpu, rpc_layer
        self._tasks_per_node = _tasks_per_node(tasks_per_node)
        _check_ports(port_base, self._tasks_per_node)
        most, assigned = max(self._tasks_per_node.values(), default=0), sum(self._tasks_per_node.values())
        for name, gpus in (("gpus_per_node", gpus_per_node), ("gpus_per_task", gpus_per_task)):
            if gpus is not None and not isinstance(gpus, int):
                raise TypeError(f"`{name}` must be a whole number of GPUs, got {gpus!r}; leave it out to find it.")
        if gpus_per_node is None:
            gpus_per_node = super().num_accelerators().get("GPU", 0)
        if gpus_per_task is None:
            gpus_per_task = gpus_per_node // max(most, 1)
        self._gpus_per_task = gpus_per_task
        if most * gpus_per_task > gpus_per_node:
            raise RuntimeError(
                f"Requested more GPUs per node than available: {most} tasks with {gpus_per_task} GPU(s) each, but a "
                f"node has {gpus_per_node}. Lower gpus_per_task or the step's tasks per node."
            )
        if sum(self._jobs.values()) != assigned:
            raise RuntimeError(
                f"Requested {sum(self._jobs.values())} tasks ({self._jobs}) but {assigned} were assigned to this "
                "SLURM step; make `jobs` add up to srun's --ntasks."
            )
        self._task_type, self._task_id = self._own_task()

    def _own_task(self) -> tuple[str, int]:
        first = 0
        for job, count in sorted(self._jobs.items()):
            if self._rank < first + count:
                return job, self._rank - first
            first += count
        raise RuntimeError(f"SLURM_PROCID={self._rank} does not fit the {first} task(s) of {self._jobs}.")

    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the step; also chooses this task's GPUs if ``auto_set_gpu``."""
        addresses, gpus = [], []
        for host, tasks in self._tasks_per_node.items():
            for place in range(tasks):
                addresses.append(f"{host}:{self._port_base + place}")
                start = place * self._gpus_per_task
                gpus.append(",".join(str(gpu) for gpu in range(start, start + self._gpus_per_task)))
        if self._auto_set_gpu and self._gpus_per_task:
            launch_env.set_visible_gpus(gpus[self._rank])
        cluster, first = {}, 0
        for job, count in sorted(self._jobs.items()):
            cluster[job] = addresses[first : first + count]
            first += count
        return ClusterSpec(cluster)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """This process's job and index."""
        return self.task_type, self.task_id

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task, by default this process's; see ``ClusterResolver``."""
        return self._own_master(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """``{"GPU": gpus_per_task}``, the same for every task."""
        return {"GPU": self._gpus_per_task}


def _tasks_per_node(given: int | dict[str, int] | None) -> dict[str, int]:
    """The number of tasks of each host, in the order in which SLURM numbers them."""
    if isinstance(given, dict):
        return _checked("tasks_per_node", "host0", given)
    if given is not None and not isinstance(given, int):
        raise RuntimeError(f"`tasks_per_node` has to be an integer or a dictionary, got {given!r}.")
    hosts = expand_hostlist(_slurm("STEP_NODELIST"))
    if given is not None:
        return _checked("tasks_per_node", "host0", dict.fromkeys(hosts, given))
    counts = expand_tasks_per_node(_slurm("STEP_TASKS_PER_NODE"))
    if len(counts) != len(hosts):
        raise RuntimeError(
            f"SLURM_STEP_NODELIST names {len(hosts)} node(s), SLURM_STEP_TASKS_PER_NODE has the tasks of "
            f"{len(counts)}. Start the script with srun, which sets both."
        )
    return dict(zip(hosts, counts, strict=True))


def _checked(name: str, key: str, counts: dict[str, int]) -> dict[str, int]:
    """An argument that has numbers of tasks; ``key`` is for the example."""
    example = f"write e.g. {name}={{{key!r}: 2}}."
    if not isinstance(counts, dict):
        raise TypeError(f"`{name}` must be a dictionary of numbers of tasks, got {counts!r}; {example}")
    for one, count in counts.items():
        if not isinstance(count, int):
            raise TypeError(f"`{name}` must have whole numbers of tasks, got {count!r} for {one!r}; {example}")
        if count < 0:
            raise ValueError(f"`{name}` has {count} tasks for {one!r}, which is negative; {example}")
    return counts


def _check_ports(first: int, tasks_per_node: dict[str, int]) -> None:
    if not isinstance(first, int):
        raise TypeError(f"`port_base` must be a whole number, got {first!r}; write e.g. port_base=8888.")
    last = first + max([1, *tasks_per_node.values()]) - 1
    if not 0 < first <= last < 1 << 16:
        raise ValueError(
            f"port_base={first} gives the tasks of a node the ports {first} to {last}, but ports are the numbers from "
            "1 to 65535; write e.g. port_base=8888."
        )


def _slurm(name: str) -> str:
    value = launch_env.slurm(name)
    if value is None:
        raise RuntimeError(
            f"SLURM_{name} not found in environment. Not running inside a SLURM step? Start the script with srun."
        )
    return value


def _slurm_number(name: str) -> int:
    value = _slurm(name)
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise ValueError(f"SLURM_{name}={_shown(value)} is no whole number. Start the script with srun, which sets it.")
    return int(value)
