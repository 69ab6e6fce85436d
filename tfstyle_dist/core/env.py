"""Every environment variable the package reads, in one place (the table in README.md)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

DEFAULT_TIMEOUT = timedelta(minutes=5)


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
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"Environment variable {name}={text!r} is not a whole number; unset it or write e.g. {name}=0."
        ) from None


def launch() -> Launch | None:
    """The launcher's ranks, or ``None`` when the process was started by hand."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, world = _int("RANK", 0), _int("WORLD_SIZE", 1)
    if not 0 <= rank < world:
        raise ValueError(f"RANK={rank} does not fit WORLD_SIZE={world}: RANK counts from 0 to WORLD_SIZE - 1.")
    return Launch(rank, world, _int("LOCAL_RANK", rank), _int("LOCAL_WORLD_SIZE", world))


def rendezvous_file() -> str | None:
    """``TFSTYLE_RENDEZVOUS_FILE``: ranks meet through this file instead of MASTER_ADDR:MASTER_PORT."""
    return os.environ.get("TFSTYLE_RENDEZVOUS_FILE") or None


def master_address() -> tuple[str, int] | None:
    """``MASTER_ADDR`` and ``MASTER_PORT``, where worker 0 is; ``None`` unless both are set."""
    host = os.environ.get("MASTER_ADDR")
    return (host, _int("MASTER_PORT", 0)) if host and os.environ.get("MASTER_PORT") else None


def launcher_has_store() -> bool:
    """``TORCHELASTIC_USE_AGENT_STORE``: torchrun itself, not worker 0, answers at the master address."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def tf_config() -> str | None:
    """``TF_CONFIG``: the cluster and this process's task as JSON, as TensorFlow reads it."""
    return os.environ.get("TF_CONFIG")


def slurm(name: str) -> str | None:
    """``SLURM_<name>``, set by srun."""
    return os.environ.get(f"SLURM_{name}")


def set_visible_gpus(gpus: str) -> None:
    """Sets ``CUDA_VISIBLE_DEVICES``, to be done before CUDA starts.

    Args:
        gpus: e.g. ``"0,1"``.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus


def timeout() -> timedelta | None:
    """``TFSTYLE_TIMEOUT_SECONDS``: the limit of every wait; 0 waits for ever; default 300."""
    text = os.environ.get("TFSTYLE_TIMEOUT_SECONDS")
    if text is None or text == "":
        return DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(
            f"TFSTYLE_TIMEOUT_SECONDS={text!r} is not a number of seconds; write e.g. 300, or 0 for no limit."
        ) from None
    if seconds < 0:
        raise ValueError(f"TFSTYLE_TIMEOUT_SECONDS={text!r} is negative; write e.g. 300, or 0 for no limit.")
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


def coordinator_patience() -> float:
    """``TFSTYLE_PS_PATIENCE_SECONDS``: how long ps and worker tasks wait for a silent coordinator; default 60."""
    text = os.environ.get("TFSTYLE_PS_PATIENCE_SECONDS") or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"TFSTYLE_PS_PATIENCE_SECONDS={text!r} is not a number of seconds above 0; write e.g. 60.")
    return seconds


def log_level() -> str:
    """``TFSTYLE_LOG_LEVEL``: level of the package's logger; default WARNING."""
    return os.environ.get("TFSTYLE_LOG_LEVEL", "WARNING").upper()
