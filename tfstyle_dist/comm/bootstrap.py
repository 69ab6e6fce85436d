"""From what a launcher says to a worker group."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.comm.options import CommunicationImplementation, CommunicationOptions
from tfstyle_dist.comm.single_group import SingleGroup
from tfstyle_dist.core import env
from tfstyle_dist.core.errors import DeadlineExceededError
from tfstyle_dist.core.logging import get_logger

_FOREVER = timedelta(days=365)


def effective_timeout(options: CommunicationOptions) -> timedelta | None:
    """The limit of a wait: the options' own, else ``TFSTYLE_TIMEOUT_SECONDS``, else 5 minutes."""
    return options.timeout if options.timeout_seconds is not None else env.timeout()


def _backend(device: torch.device, options: CommunicationOptions) -> str:
    import torch.distributed as dist

    wanted = options.implementation
    if wanted is CommunicationImplementation.NCCL and (device.type != "cuda" or not dist.is_nccl_available()):
        raise ValueError(
            f"CommunicationImplementation.NCCL was asked for, but the replicas are on {device.type} and NCCL is "
            f"{'available' if dist.is_nccl_available() else 'missing from this torch build'}. Use AUTO or RING."
        )
    if wanted is CommunicationImplementation.RING or device.type != "cuda":
        return "gloo"
    if not dist.is_nccl_available():
        get_logger().warning("NCCL is missing from this torch build: gradients between GPUs go through Gloo, which is slow.")
        return "gloo"
    return "nccl"


def _meet(launch: env.Launch, timeout: timedelta | None) -> Any:
    """The store where the ranks meet; waits until all are there, and names the absent ones if they do not come."""
    import torch.distributed as dist

    limit = timeout or _FOREVER
    path = env.rendezvous_file()
    if path is not None:
        store: Any = dist.FileStore(path, launch.world_size)
        store.set_timeout(limit)
    elif env.has_master_address():
        store, _, _ = next(iter(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=limit)))
    else:
        raise ValueError(
            f"RANK={launch.rank} and WORLD_SIZE={launch.world_size} are set, but neither MASTER_ADDR and MASTER_PORT nor "
            "TFSTYLE_RENDEZVOUS_FILE says where the workers meet. Start the script with torchrun, or unset RANK and "
            "WORLD_SIZE to run one process."
        )
    store = dist.PrefixStore("tfstyle", store)
    store.set(f"hello/{launch.rank}", "1")
    keys = [f"hello/{r}" for r in range(launch.world_size)]
    try:
        store.wait(keys, limit)
    except Exception as error:
        absent = []
        for rank, key in enumerate(keys):
            with contextlib.suppress(Exception):
                if store.check([key]):
                    continue
            absent.append(rank)
        raise DeadlineExceededError(
            f"Worker(s) {absent} of {launch.world_size} did not start within {limit.total_seconds():g} s. Start one process "
            "for each rank, or raise TFSTYLE_TIMEOUT_SECONDS."
        ) from error
    return store


def make_group(device: torch.device, options: CommunicationOptions) -> WorkerGroup:
    """The group of all worker processes that the launcher started; a group of one when there was no launcher.

    A process group that the program made itself is kept: a group of the same members is made beside it.

    Args:
        device: where this worker's tensors live; decides NCCL or Gloo.
        options: timeout and implementation.

    Raises:
        ValueError: world sizes disagree, or the requested implementation cannot run here.
        DeadlineExceededError: a worker did not start in time; the message lists the absent ranks.
    """
    launch = env.launch()
    import torch.distributed as dist

    initialized = dist.is_available() and dist.is_initialized()
    if initialized and launch is not None and dist.get_world_size() != launch.world_size:
        raise ValueError(
            f"torch.distributed was initialised with {dist.get_world_size()} worker(s), but WORLD_SIZE={launch.world_size}. "
            "Initialise it for all ranks, or let the strategy do it."
        )
    if not initialized and (launch is None or launch.world_size == 1):
        return SingleGroup()
    if initialized and dist.get_world_size() == 1:
        return SingleGroup()
    from tfstyle_dist.comm.torch_group import TorchGroup

    timeout, backend = effective_timeout(options), _backend(device, options)
    control = device if backend == "nccl" else torch.device("cpu")
    if initialized:
        group = dist.new_group(backend=backend, timeout=timeout or _FOREVER)
        return TorchGroup(group, timeout, _default_store(), control, lambda: _leave(group))
    assert launch is not None
    store = _meet(launch, timeout)
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout or _FOREVER
    )
    return TorchGroup(dist.group.WORLD, timeout, store, control, _leave_default)


def _default_store() -> Any:
    import torch.distributed.distributed_c10d as c10d

    return getattr(c10d, "_get_default_store", lambda: None)()


def _leave(group: Any) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group(group)


def _leave_default() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
