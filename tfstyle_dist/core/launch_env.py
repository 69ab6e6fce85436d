"""What launchers and cluster managers say in environment variables: torchrun, accelerate, Slurm, TPUs, TensorFlow."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tfstyle_dist.core import env

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TFSTYLE_RENDEZVOUS_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
)
_JOB_ENDED_FILE = "TFSTYLE_JOB_ENDED_FILE"


@dataclass(frozen=True)
class Launch:
    """What a launcher such as torchrun says about this process.

    Attributes:
        rank: this worker's number, 0 to ``world_size - 1``.
        world_size: how many worker processes there are.
        local_rank: this worker's number on its host.
        local_world_size: how many workers this host has.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def _int(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):
        raise ValueError(
            f"Environment variable {name}={text[:200]!r} is not a whole number; unset it or write e.g. {name}=0."
        )
    return int(text)


def launch() -> Launch | None:
    """The launcher's ranks, or ``None`` when the process was started by hand: variables are not there, or all empty."""
    texts = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if None in texts.values() or not any(texts.values()):
        return None
    if empty := [name for name, text in texts.items() if not text]:
        raise ValueError(
            f"Environment variable {empty[0]} is empty, but RANK and WORLD_SIZE say together which worker this is, and "
            f"they are {texts}. Write the number in it, e.g. RANK=0 and WORLD_SIZE=2, or unset both."
        )
    rank, world = _int("RANK", 0), _int("WORLD_SIZE", 1)
    if not 0 <= rank < world:
        raise ValueError(f"RANK={rank} does not fit WORLD_SIZE={world}: RANK counts from 0 to WORLD_SIZE - 1.")
    local_rank, local_world = _int("LOCAL_RANK", rank), _int("LOCAL_WORLD_SIZE", world)
    if not 0 <= local_rank < local_world <= world:
        raise ValueError(
            f"LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_world} do not fit WORLD_SIZE={world}: LOCAL_RANK "
            "counts from 0 to LOCAL_WORLD_SIZE - 1, and a host has no more workers than there are."
        )
    return Launch(rank, world, local_rank, local_world)


def rendezvous_file() -> str | None:
    """``TFSTYLE_RENDEZVOUS_FILE``: ranks meet through this file instead of MASTER_ADDR:MASTER_PORT."""
    return os.environ.get("TFSTYLE_RENDEZVOUS_FILE") or None


def job_has_ended() -> bool:
    """Whether what has started an elastic job has seen a worker end well; it makes a file then."""
    path = os.environ.get(_JOB_ENDED_FILE)
    return path is not None and os.path.exists(path)


def master_address() -> tuple[str, int] | None:
    """``MASTER_ADDR`` and ``MASTER_PORT``, where worker 0 is; ``None`` unless both are set."""
    host = os.environ.get("MASTER_ADDR")
    if not host or not os.environ.get("MASTER_PORT"):
        return None
    port = _int("MASTER_PORT", 0)
    if not 0 <= port < 1 << 16:
        raise ValueError(f"MASTER_PORT={port} is no port; write a number from 0 to 65535.")
    return host, port


def launcher_has_store() -> bool:
    """``TORCHELASTIC_USE_AGENT_STORE``: torchrun itself, not worker 0, answers at the master address."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def accelerate_modes() -> list[str]:
    """Those of ``ACCELERATE_USE_FSDP`` and its relatives that are true: ways to train set by ``accelerate launch``."""
    kinds = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
    names = [f"ACCELERATE_USE_{kind}" for kind in kinds]
    return [name for name in names if os.environ.get(name, "false").lower() in ("1", "true", "yes", "on")]


def accelerate_device() -> str | None:
    """``ACCELERATE_TORCH_DEVICE``: the device that accelerate uses, whatever else there is."""
    return os.environ.get("ACCELERATE_TORCH_DEVICE") or None


def accelerate_started_one_of_several() -> bool:
    """Whether ``accelerate launch`` was asked for several processes but started this one alone.

    Its simple launcher, the one for CPUs, sets a rendezvous for several processes and no ranks.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "ACCELERATE_DYNAMO_BACKEND" in os.environ
    alone = not any(name in os.environ for name in ("RANK", "LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))
    return launched and alone and master_address() is not None


def _launcher_variables(launch: Launch, address: tuple[str, int]) -> dict[str, str]:
    values = (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size, *address)
    return dict(zip(LAUNCHER_VARIABLES, map(str, values), strict=False))


def set_launcher_variables(launch: Launch, address: tuple[str, int], timeout_seconds: float | None) -> None:
    """Sets torchrun's variables for good, in a process that an engine has started; those of others are replaced.

    Args:
        launch: the ranks.
        address: where worker 0 opens the rendezvous.
        timeout_seconds: ``TFSTYLE_TIMEOUT_SECONDS``; ``None`` leaves it as it is.
    """
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(_launcher_variables(launch, address))
    if timeout_seconds is not None:
        os.environ["TFSTYLE_TIMEOUT_SECONDS"] = str(timeout_seconds)


def set_elastic_task(tf_config: str, timeout_seconds: float | None) -> None:
    """Makes this process, which an engine has started, a task of an elastic job for good.

    Args:
        tf_config: its ``TF_CONFIG``.
        timeout_seconds: ``TFSTYLE_TIMEOUT_SECONDS``; ``None`` leaves it as it is.
    """
    for name in (*LAUNCHER_VARIABLES, _JOB_ENDED_FILE):
        os.environ.pop(name, None)
    os.environ["TF_CONFIG"] = tf_config
    if timeout_seconds is not None:
        os.environ["TFSTYLE_TIMEOUT_SECONDS"] = str(timeout_seconds)


def set_job_has_ended() -> None:
    """From now on ``job_has_ended`` is true in this process: an engine has said so, and made no file."""
    os.environ[_JOB_ENDED_FILE] = os.devnull  # is always there


def launcher_variables_set(launch: Launch, address: tuple[str, int]) -> AbstractContextManager[None]:
    """Sets torchrun's variables for a while, for a library that learns of the workers in no other way.

    Variables that are there already stay as they are; those that were not are removed at the end.

    Args:
        launch: the ranks.
        address: host and port for ``MASTER_ADDR`` and ``MASTER_PORT``; nobody needs to listen there.
    """
    return env.set_for_a_while(_launcher_variables(launch, address))


def slurm_job_id() -> int:
    """``SLURM_JOB_ID``; 0 outside a job."""
    return _int("SLURM_JOB_ID", 0)


def slurm_tasks() -> int:
    """``SLURM_STEP_NUM_TASKS``: the tasks of this job step; 1 outside of one."""
    return _int("SLURM_STEP_NUM_TASKS", 1)


def tf_config() -> str | None:
    """``TF_CONFIG``: the cluster and this process's task as JSON, as TensorFlow reads it."""
    return os.environ.get("TF_CONFIG")


def slurm(name: str) -> str | None:
    """``SLURM_<name>``, set by srun."""
    return os.environ.get(f"SLURM_{name}")


def says_tpu() -> bool:
    """Whether a variable says that this host is one of a TPU slice."""
    return any(os.environ.get(f"TPU_{name}") for name in ("WORKER_HOSTNAMES", "WORKER_ID", "CHIPS_PER_HOST_BOUNDS"))


def tpu_hosts() -> list[str]:
    """``TPU_WORKER_HOSTNAMES``: the hosts of this TPU slice; default: this host."""
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").removesuffix(",").split(",")
    if len(hosts) > 1 and not all(hosts):
        raise ValueError(f"TPU_WORKER_HOSTNAMES={','.join(hosts)!r} has a host without a name; write e.g. host0,host1.")
    return hosts if hosts[0] else ["localhost"]


def tpu_worker_id() -> int:
    """``TPU_WORKER_ID``: which of them this host is; default 0."""
    return _int("TPU_WORKER_ID", 0)


def tpu_chips_per_host() -> list[int]:
    """``TPU_CHIPS_PER_HOST_BOUNDS``: how one host's chips are laid out, e.g. ``2,2,1``; empty if not set."""
    text = os.environ.get("TPU_CHIPS_PER_HOST_BOUNDS", "")
    if text and not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
        raise ValueError(
            f"TPU_CHIPS_PER_HOST_BOUNDS={text[:200]!r} is no list of numbers; write e.g. 2,2,1, or unset it."
        )
    return [int(side) for side in text.split(",")] if text else []


def set_visible_gpus(gpus: str) -> None:
    """Sets ``CUDA_VISIBLE_DEVICES``, to be done before CUDA starts.

    Args:
        gpus: e.g. ``"0,1"``.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus


def visible_gpus() -> list[str] | None:
    """The names of the GPUs that a child process would see; ``None`` when that is not known without asking CUDA."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is not None:
        return [gpu for gpu in text.split(",") if gpu]
    try:
        return [str(number) for number in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    except OSError:
        return None


def for_task(
    tf_config: str,
    num_tasks: int,
    gpus: Sequence[str] | None,
    key: str | None = None,
    ended_file: str | None = None,
) -> dict[str, str]:
    """The environment of a task that the launcher starts: this process's, without another launcher's variables.

    Args:
        tf_config: its ``TF_CONFIG``.
        num_tasks: how many tasks share the cores.
        gpus: the GPUs it may use, ``None`` for all.
        key: path of a key file that was made for the job; ``None``: what the user has set.
        ended_file: of an elastic job: what ``job_has_ended`` looks for.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // num_tasks, 1)))
    environment |= {"TF_CONFIG": tf_config, "PYTHONUNBUFFERED": "1"}
    if key is not None:
        environment["TFSTYLE_PS_KEYS"] = key
        environment.setdefault("TFSTYLE_PS_TCP", "always")  # who can read this host's loopback can read its memory
    if ended_file is not None:
        environment[_JOB_ENDED_FILE] = ended_file
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment
