"""Which tasks a cluster has, and the environment of each."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from tfstyle_dist.core import env, launch_env, network
from tfstyle_dist.launch.task import Task

_HOST = "127.0.0.1"


@contextmanager
def key_of_job(ps: int) -> Iterator[str | None]:
    """A key for one job with parameter servers: other processes of this machine cannot talk to its tasks.

    Args:
        ps: how many tasks ``ps`` the job has.

    Yields:
        The path of a key file that is gone afterwards; ``None``: the user gave keys or wants none
        (``TFSTYLE_PS_INSECURE``), or nothing uses them.
    """
    given = env.parameter_server_keys() is not None or env.insecure_parameter_server()
    if ps == 0 or given or find_spec("zmq") is None:
        yield None
        return
    from tfstyle_dist.parameter_server.protocol.zeromq_sockets import new_keys

    with tempfile.TemporaryDirectory(prefix="tfstyle-job-") as folder:
        path = os.path.join(folder, "key")
        new_keys(path)
        yield path


@contextmanager
def ended_file_of_job(elastic: bool) -> Iterator[str | None]:
    """Where an elastic job says that a task has come to the end.

    Yields:
        The path of a file that is not there yet, and is gone afterwards; ``None`` for a job that is not elastic.
    """
    if not elastic:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="tfstyle-job-") as folder:
        yield os.path.join(folder, "ended")


def make_tasks(
    command: Sequence[str],
    workers: int,
    ps: int,
    chief: bool,
    evaluator: bool,
    key: str | None = None,
    ended_file: str | None = None,
) -> list[Task]:
    """The tasks, not started yet.

    Args:
        command: what each of them runs.
        workers: tasks ``worker``.
        ps: tasks ``ps``.
        chief: whether there is a task ``chief``.
        evaluator: whether there is a task ``evaluator``.
        key: path of a key file that was made for the job.
        ended_file: of an elastic job: a file that is there when a task has come to the end.
    """
    counts = {"chief": int(chief), "worker": workers, "ps": ps, "evaluator": int(evaluator)}
    ports = iter(network.free_ports(sum(counts.values()), _HOST))
    cluster = {job: [f"{_HOST}:{next(ports)}" for _ in range(count)] for job, count in counts.items() if count}
    training = counts["chief"] + counts["worker"]
    gpus = _share_out(launch_env.visible_gpus(), training)
    tasks = []
    for job, addresses in cluster.items():
        for index in range(len(addresses)):
            tf_config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            trains = job in ("chief", "worker")
            place = index + (counts["chief"] if job == "worker" else 0)
            environment = launch_env.for_task(tf_config, training, gpus[place] if trains else [], key, ended_file)
            tasks.append(Task(job, index, command, environment))
    return tasks


def _share_out(gpus: Sequence[str] | None, count: int) -> list[Sequence[str] | None]:
    """An equal part of the GPUs for each training task; all of them where there are too few."""
    if gpus is None or len(gpus) < count:
        return [gpus] * count
    part = len(gpus) // count
    return [gpus[task * part : (task + 1) * part] for task in range(count)]
