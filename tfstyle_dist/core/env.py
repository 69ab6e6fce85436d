"""Every environment variable the package reads, in one place (the table in README.md)."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

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
DEFAULT_TIMEOUT = timedelta(minutes=5)
_MOST_SECONDS = 10 * 365 * 86_400.0


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
    """The launcher's ranks, or ``None`` when the process was started by hand."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
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


def master_address() -> tuple[str, int] | None:
    """``MASTER_ADDR`` and ``MASTER_PORT``, where worker 0 is; ``None`` unless both are set."""
    host = os.environ.get("MASTER_ADDR")
    if not host or not os.environ.get("MASTER_PORT"):
        return None
    port = _int("MASTER_PORT", 0)
    if not 0 <= port < 1 << 16:
        raise ValueError(f"MASTER_PORT={port} is no port; write a number from 0 to 65535.")
    return host, port


def gloo_interface() -> str | None:
    """``GLOO_SOCKET_IFNAME``: the network interface for Gloo."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


@contextmanager
def gloo_interface_set(name: str | None) -> Iterator[None]:
    """Sets ``GLOO_SOCKET_IFNAME`` for a while, unless the user has.

    Args:
        name: the interface, ``None`` to leave the choice to Gloo.
    """
    if name is None or gloo_interface() is not None:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


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


@contextmanager
def launcher_variables_set(launch: Launch, address: tuple[str, int]) -> Iterator[None]:
    """Sets torchrun's variables for a while, for a library that learns of the workers in no other way.

    Variables that are there already stay as they are; those that were not are removed at the end.

    Args:
        launch: the ranks.
        address: host and port for ``MASTER_ADDR`` and ``MASTER_PORT``; nobody needs to listen there.
    """
    wanted = {
        "RANK": launch.rank,
        "WORLD_SIZE": launch.world_size,
        "LOCAL_RANK": launch.local_rank,
        "LOCAL_WORLD_SIZE": launch.local_world_size,
        "MASTER_ADDR": address[0],
        "MASTER_PORT": address[1],
    }
    added = [name for name in wanted if name not in os.environ]
    for name in added:
        os.environ[name] = str(wanted[name])
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


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


def for_task(tf_config: str, num_tasks: int, gpus: Sequence[str] | None, key: str | None = None) -> dict[str, str]:
    """The environment of a task that the launcher starts: this process's, without another launcher's variables.

    Args:
        tf_config: its ``TF_CONFIG``.
        num_tasks: how many tasks share the cores.
        gpus: the GPUs it may use, ``None`` for all.
        key: path of a key file that was made for the job; ``None``: what the user has set.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // num_tasks, 1)))
    environment |= {"TF_CONFIG": tf_config, "PYTHONUNBUFFERED": "1"}
    if key is not None:
        environment["TFSTYLE_PS_KEYS"] = key
        environment.setdefault("TFSTYLE_PS_TCP", "always")  # who can read this host's loopback can read its memory
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return environment


def timeout() -> timedelta | None:
    """``TFSTYLE_TIMEOUT_SECONDS``: the limit of every wait; 0 waits for ever; default 300."""
    return _seconds("TFSTYLE_TIMEOUT_SECONDS", DEFAULT_TIMEOUT)


def start_timeout(default: timedelta | None) -> timedelta | None:
    """``TFSTYLE_START_TIMEOUT_SECONDS``: the limit of the wait for all workers to start; 0 waits for ever.

    Args:
        default: the limit where the variable is not set.
    """
    return _seconds("TFSTYLE_START_TIMEOUT_SECONDS", default)


def _seconds(name: str, default: timedelta | None) -> timedelta | None:
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number of seconds; write e.g. 300, or 0 for no limit.") from None
    if seconds < 0:
        raise ValueError(f"{name}={text!r} is negative; write e.g. 300, or 0 for no limit.")
    if not seconds <= _MOST_SECONDS:
        raise ValueError(f"{name}={text!r} is no time that one can wait; write e.g. 300, or 0 for no limit.")
    return timedelta(seconds=seconds) if seconds else None


def debug_collectives() -> bool:
    """``TFSTYLE_DEBUG`` contains ``collectives``: compare every call over the workers first, gradients and GPUs too."""
    return "collectives" in os.environ.get("TFSTYLE_DEBUG", "").split(",")


def shared_memory() -> bool:
    """``TFSTYLE_SHARED_MEMORY``: 0 makes CPU workers of one host use sockets instead; default 1."""
    return os.environ.get("TFSTYLE_SHARED_MEMORY", "1") != "0"


def host_name() -> str | None:
    """``TFSTYLE_HOST``: a name for this host instead of its own; workers of different names share no memory."""
    return os.environ.get("TFSTYLE_HOST") or None


def parameter_server_keys() -> str | None:
    """``TFSTYLE_PS_KEYS``: path of the cluster's key file; unset: no encryption, loopback only."""
    return os.environ.get("TFSTYLE_PS_KEYS") or None


def insecure_parameter_server() -> bool:
    """``TFSTYLE_PS_INSECURE``: 1 lets servers without keys listen on any interface."""
    return os.environ.get("TFSTYLE_PS_INSECURE", "0") == "1"


def parameter_server_tcp(with_keys: bool) -> bool:
    """``TFSTYLE_PS_TCP``: whether tensors between hosts travel by plain TCP; default 1.

    0: never; 1: where there are no keys; ``always``: with keys too, so whoever reads the network sees them.

    Raises:
        ValueError: another value.
    """
    value = os.environ.get("TFSTYLE_PS_TCP", "1")
    if value not in ("0", "1", "always"):
        raise ValueError(
            f"TFSTYLE_PS_TCP={value!r}: write 0 (tensors travel by ZeroMQ), 1 (by plain TCP where there are no keys) "
            "or always (by plain TCP, not encrypted, also with keys)."
        )
    return value == "always" or (value == "1" and not with_keys)


def coordinator_grace() -> float:
    """``TFSTYLE_PS_PATIENCE_SECONDS``: how long ps and worker tasks wait for a silent coordinator; default 60."""
    text = os.environ.get("TFSTYLE_PS_PATIENCE_SECONDS") or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"TFSTYLE_PS_PATIENCE_SECONDS={text!r} is not a number of seconds above 0; write e.g. 60.")
    return seconds


def prefer_large_pages() -> None:
    """``THP_MEM_ALLOC_ENABLE``: makes torch ask for large pages for large tensors, unless the user has decided.

    Torch looks when it makes the first tensor of a process.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def log_level() -> str:
    """``TFSTYLE_LOG_LEVEL``: level of the package's logger; default WARNING.

    Raises:
        ValueError: the logging module has no such level.
    """
    level = (os.environ.get("TFSTYLE_LOG_LEVEL") or "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise ValueError(f"TFSTYLE_LOG_LEVEL={level!r} is no level; write DEBUG, INFO, WARNING, ERROR or CRITICAL.")
    return level


def prefer_torch_backend_of_keras() -> None:
    """Makes torch the backend of a Keras that is imported later, unless the user has chosen one."""
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "torch")


def monitor() -> bool:
    """``TFSTYLE_MONITOR``: whether strategies count where the time of their steps goes."""
    return os.environ.get("TFSTYLE_MONITOR", "1") != "0"
