"""From what a launcher or a cluster says to a worker group."""

from __future__ import annotations

import importlib
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.comm.options import CommunicationImplementation, CommunicationOptions
from tfstyle_dist.comm.peers import stacks
from tfstyle_dist.comm.peers.diagnosis import SideChannel
from tfstyle_dist.comm.rendezvous.adoption import AdoptedGroup, adopted_group, remember_own
from tfstyle_dist.comm.rendezvous.members import Members
from tfstyle_dist.comm.rendezvous.store import open_store
from tfstyle_dist.comm.single_group import SingleGroup
from tfstyle_dist.core import env, launch_env, network, torch_internals
from tfstyle_dist.core.devices import accelerator, hardware_of, is_accelerator
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.shm.namespaces import host_and_boot

if TYPE_CHECKING:
    from tfstyle_dist.comm.torch_group import TorchGroup


def effective_timeout(options: CommunicationOptions, adopted: AdoptedGroup | None = None) -> timedelta | None:
    """The limit of a wait: the options' own, else ``TFSTYLE_TIMEOUT_SECONDS``, else the group's, else 5 minutes.

    Args:
        options: of the strategy.
        adopted: the process group that was there already.
    """
    if options.timeout_seconds is not None:
        return options.timeout
    return env.timeout((adopted and adopted.limit) or env.DEFAULT_TIMEOUT)


def available_backends() -> tuple[str, ...]:
    """What this torch build can carry collectives with: ``"gloo"``, ``"nccl"``, both or nothing."""
    import torch.distributed as dist

    if not dist.is_available():
        return ()
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return tuple(name for name, there in found.items() if there)


def _backend(device: torch.device, options: CommunicationOptions) -> str:
    """What torch's group is made with: what carries the CPU's tensors, and the library of the accelerator."""
    import torch.distributed as dist

    wanted, kind = options.implementation, device.type
    if wanted is CommunicationImplementation.NCCL and (device.type != "cuda" or not dist.is_nccl_available()):
        raise ValueError(
            f"CommunicationImplementation.NCCL was asked for, but the replicas are on {device.type} and NCCL is "
            f"{'available' if dist.is_nccl_available() else 'missing from this torch build'}. Use AUTO or RING."
        )
    if wanted is CommunicationImplementation.RING or not is_accelerator(kind):
        return "gloo"
    library = "gloo"
    with suppress(ValueError):  # torch knows none for this kind
        library = dist.get_default_backend_for_device(kind)
    missing = library == "gloo" or (library == "nccl" and not dist.is_nccl_available())
    return "gloo" if missing else f"cpu:gloo,{kind}:{library}"


def members_of_launch() -> Members | None:
    """The workers that a launcher such as torchrun started; ``None`` when there was none.

    Raises:
        ValueError: RANK and WORLD_SIZE contradict each other.
    """
    launch = launch_env.launch()
    if launch is None:
        return None
    names = tuple(f"worker {rank}" for rank in range(launch.world_size))
    return Members(launch.rank, launch.world_size, names, launch_env.master_address())


def make_group(
    device: torch.device,
    options: CommunicationOptions,
    members: Members | None = None,
    num_local_replicas: int = 1,
    adopted: AdoptedGroup | None = None,
) -> WorkerGroup:
    """The group of all worker processes; a group of one when there are no others.

    A process group that the program made itself is kept: a group of the same members is made beside it.

    Args:
        device: where this worker's tensors live; decides NCCL or Gloo.
        options: timeout and implementation.
        members: the workers; default: those that a launcher started.
        num_local_replicas: how many replicas this worker holds; must be the same on all.
        adopted: the process group that is there already; default: torch's default group, if there is one.

    Raises:
        ValueError: the workers, or the numbers of replicas, disagree, or the implementation cannot run here.
        DeadlineExceededError: a worker did not start in time; the message lists the absent ones.
        PeerLostError: a worker died or gave up during start-up.
        UnavailableError: the port of the rendezvous is in use.
    """
    launched, adopted = members is None, adopted or adopted_group()
    members = members or members_of_launch()
    if adopted is not None:
        adopted.check_members(members, launched)
    backend = (adopted and adopted.backend_for(device, options)) or _backend(device, options)
    if (adopted.size if adopted else members.size if members else 1) == 1:
        return SingleGroup()
    import torch.distributed as dist

    from tfstyle_dist.comm.torch_group import TorchGroup
    from tfstyle_dist.comm.torch_transport import torch_limit

    if is_accelerator(device.type):  # what the program puts on "cuda" goes to this worker's own device too
        accelerator(device.type).set_device(device)
        if "," not in backend and options.implementation is not CommunicationImplementation.RING:
            get_logger().warning(
                "%s sums between %s devices: gradients travel over the CPU, which is slow.%s",
                "Nothing in the process group that was there already" if adopted else "No library of this torch build",
                device.type.upper(),
                " Initialise torch.distributed with the backend of the devices too, such as cpu:gloo,cuda:nccl."
                if adopted
                else "",
            )
    timeout = effective_timeout(options, adopted)
    stacks.start()
    with ExitStack() as failed:
        failed.callback(stacks.stop)  # the group stops it otherwise
        if adopted is not None:
            torch_group = adopted.own_group(backend, timeout)
            channel = SideChannel(torch_internals.default_store())
            group = TorchGroup(torch_group, timeout, channel, backend, lambda: _leave(torch_group))
        else:
            assert members is not None
            before_default_group()
            store, channel = open_store(members, env.start_timeout(timeout))
            # Gloo would take the interface that this host's own name resolves to, which is often the loopback.
            towards = network.interface_towards(*members.address) if members.address else None
            with env.gloo_interface_set(towards):
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=members.rank,
                    world_size=members.size,
                    timeout=torch_limit(timeout, backend),
                )
            remember_own(dist.group.WORLD)
            group = TorchGroup(dist.group.WORLD, timeout, channel, backend, _leave_default)
        failed.pop_all()
    _check_places(group, device, options, num_local_replicas)
    return group


def before_default_group() -> None:
    """Imports what would keep the default group, and its threads, until the interpreter ends.

    The functions of ``torch.distributed.nn.functional`` have the default group of the time of their import as a default
    argument, and torch imports them with its first optimizer. A thread of Gloo that still frees a tensor when the
    interpreter goes aborts the process ("terminate called without an active exception").
    """
    import torch.distributed as dist

    if dist.is_available():
        importlib.import_module("torch.distributed.nn.functional")


def default_process_group() -> Any:
    """The default group of ``torch.distributed``; ``None`` when it is not initialised."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _check_places(
    group: TorchGroup, device: torch.device, options: CommunicationOptions, num_local_replicas: int
) -> None:
    """All workers hold as many replicas, on one kind of device; those that share a device cannot use its library."""
    own = is_accelerator(device.type)
    hardware = [*host_and_boot(), env.host_name() or "", hardware_of(device)] if own else []
    told = group.gather_objects([num_local_replicas, device.type, hardware], "replicas of each worker")
    if any(facts[:2] != told[0][:2] for facts in told):
        group.close()
        listed = ", ".join(f"worker {rank}: {count} on {kind}" for rank, (count, kind, _) in enumerate(told))
        raise ValueError(
            f"All workers must hold the same number of replicas on the same kind of device, got {listed}. Give every "
            "worker the same `devices`, or hide GPUs with CUDA_VISIBLE_DEVICES."
        )
    if not own or group.backend_of(device) == "cpu":
        return
    first: dict[tuple[str, ...], int] = {}
    sharing = [
        (first[place], rank)
        for rank, facts in enumerate(told)
        if first.setdefault(place := tuple(facts[2]), rank) != rank
    ]
    if not sharing:
        return
    who = f"{sharing[0][0]} and {sharing[0][1]} share a {device.type.upper()} device"
    if options.implementation is CommunicationImplementation.NCCL:
        group.close()
        raise ValueError(
            f"CommunicationImplementation.NCCL was asked for, but workers {who}, which NCCL refuses. Start at most one "
            "worker for each GPU, or use AUTO or RING."
        )
    group.leave_library()
    if group.rank == sharing[0][0]:
        get_logger().warning(
            "Workers %s: gradients travel over the CPU, which is slow. Start at most one worker for each device.", who
        )


def _leave(group: Any) -> None:
    import torch.distributed as dist

    stacks.stop()
    if dist.is_initialized():
        with suppress(ValueError):  # gone already: who made the default group has destroyed it, and all others with it
            dist.destroy_process_group(group)


def _leave_default() -> None:
    import torch.distributed as dist

    stacks.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
