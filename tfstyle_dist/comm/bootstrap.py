"""From what a launcher says to a worker group."""

from __future__ import annotations

import contextlib
import importlib
from datetime import timedelta
from typing import Any

import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.comm.options import CommunicationImplementation, CommunicationOptions
from tfstyle_dist.comm.single_group import SingleGroup
from tfstyle_dist.core import env
from tfstyle_dist.core.errors import DeadlineExceededError, UnavailableError
from tfstyle_dist.core.logging import get_logger

_FOREVER = timedelta(days=365)
_meetings: dict[str, int] = {}


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
        get_logger().warning(
            "NCCL is missing from this torch build: gradients between GPUs go through Gloo, which is slow."
        )
        return "gloo"
    return "nccl"


def _meet(launch: env.Launch, timeout: timedelta | None) -> Any:
    """The store where the ranks meet; waits until all are there, and names the absent ones if they do not come."""
    import torch.distributed as dist

    limit = timeout or _FOREVER
    path, address = env.rendezvous_file(), env.master_address()
    if path is not None:
        store: Any = dist.FileStore(path, launch.world_size)
        store.set_timeout(limit)
    elif address is not None:
        store = _network_store(launch, address, limit)
    else:
        raise ValueError(
            f"RANK={launch.rank} and WORLD_SIZE={launch.world_size} are set, but neither MASTER_ADDR and "
            f"MASTER_PORT nor "
            "TFSTYLE_RENDEZVOUS_FILE says where the workers meet. Start the script with torchrun, or unset RANK and "
            "WORLD_SIZE to run one process."
        )
    # What an earlier strategy of this process left in the store must not be taken for this one's.
    place = str(path or address)
    _meetings[place] = _meetings.get(place, 0) + 1
    store = dist.PrefixStore(f"tfstyle/{_meetings[place]}", store)
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
            f"Worker(s) {absent} of {launch.world_size} did not start within {limit.total_seconds():g} s. Start "
            f"one process "
            "for each rank, or raise TFSTYLE_TIMEOUT_SECONDS."
        ) from error
    return store


def _network_store(launch: env.Launch, address: tuple[str, int], limit: timedelta) -> Any:
    """The store at the master address; the one that worker 0 opens does not wait for the others yet."""
    import torch.distributed as dist

    try:
        if env.launcher_has_store():
            return next(iter(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=limit)))[0]
        host, port = address
        return dist.TCPStore(
            host, port, launch.world_size, launch.rank == 0, limit, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        where = f"MASTER_ADDR:MASTER_PORT = {address[0]}:{address[1]}"
        said = str(error).strip().partition("\n")[0]
        if "timed out" in said.lower():
            raise DeadlineExceededError(
                f"Worker {launch.rank} of {launch.world_size} did not reach worker 0 at {where} within "
                f"{limit.total_seconds():g} s ({said}). Check that worker 0 runs there and that the address can be "
                "reached from here."
            ) from error
        raise UnavailableError(
            f"Worker {launch.rank} of {launch.world_size} cannot use {where}: {said}. Choose another MASTER_PORT if it "
            "is taken, and check the address."
        ) from error


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
            f"torch.distributed was initialised with {dist.get_world_size()} worker(s), but "
            f"WORLD_SIZE={launch.world_size}. "
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
    # Its functions keep the default group of the time of their import as a default argument, and torch.optim imports
    # it: imported later, it would keep the group and its threads until the interpreter ends (see TorchGroup.close).
    importlib.import_module("torch.distributed.nn.functional")
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
