"""Which tasks a cluster has, and the environment of each."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tfstyle_dist.core import env, network
from tfstyle_dist.launch.task import Task

_HOST = "127.0.0.1"


def make_tasks(command: Sequence[str], workers: int, ps: int, chief: bool, evaluator: bool) -> list[Task]:
    """The tasks, not started yet.

    Args:
        command: what each of them runs.
        workers: tasks ``worker``.
        ps: tasks ``ps``.
        chief: whether there is a task ``chief``.
        evaluator: whether there is a task ``evaluator``.
    """
    counts = {"chief": int(chief), "worker": workers, "ps": ps, "evaluator": int(evaluator)}
    ports = iter(network.free_ports(sum(counts.values()), _HOST))
    cluster = {job: [f"{_HOST}:{next(ports)}" for _ in range(count)] for job, count in counts.items() if count}
    training = counts["chief"] + counts["worker"]
    gpus = _share_out(env.visible_gpus(), training)
    tasks = []
    for job, addresses in cluster.items():
        for index in range(len(addresses)):
            tf_config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            trains = job in ("chief", "worker")
            place = index + (counts["chief"] if job == "worker" else 0)
            environment = env.for_task(tf_config, training, gpus[place] if trains else [])
            tasks.append(Task(job, index, command, environment))
    return tasks


def _share_out(gpus: Sequence[str] | None, count: int) -> list[Sequence[str] | None]:
    """An equal part of the GPUs for each training task; all of them where there are too few."""
    if gpus is None or len(gpus) < count:
        return [gpus] * count
    part = len(gpus) // count
    return [gpus[task * part : (task + 1) * part] for task in range(count)]
