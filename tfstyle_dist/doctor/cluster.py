"""The cluster that this process is told of: who is in it, who can be reached, and how tasks find each other."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from datetime import timedelta

import torch

from tfstyle_dist.cluster_resolver import ClusterResolver, TorchrunClusterResolver, roles
from tfstyle_dist.cluster_resolver.tf_config import missing_cluster
from tfstyle_dist.comm.options import CommunicationOptions
from tfstyle_dist.comm.rendezvous.bootstrap import make_group
from tfstyle_dist.core import env, launch_env, network
from tfstyle_dist.doctor.finding import Finding, ok, problem, warning
from tfstyle_dist.doctor.machine import package_version
from tfstyle_dist.parameter_server.addresses import is_loopback
from tfstyle_dist.parameter_server.protocol.key_pair import Keys
from tfstyle_dist.strategies.multi_worker_mirrored import members_of, resolver_from_environment

_CONNECT_SECONDS = 3.0
_SKEW_SECONDS = 1.0
_NUMBERS = 1_000_000


def settings() -> Iterator[Finding]:
    """The package's own environment variables."""
    for text in (*env.refused(), *_refused_keys()):
        yield problem("settings", text, "correct or unset the variable")
    for text in env.without_effect():
        yield warning("settings", text, "correct or unset the variable")
    try:
        limit, start = env.timeout(), env.start_timeout(env.timeout())
    except ValueError:
        return
    for name, seconds in (("a wait", limit), ("the start of all workers", start)):
        if seconds is None:
            yield warning("settings", f"no limit for {name}", "a lost worker would be waited for without end")
        elif seconds < timedelta(seconds=5):
            yield warning("settings", f"the limit for {name} is {seconds.total_seconds():g} s", "slow hosts need more")
    yield ok("settings", f"limit of a wait {_text(limit)}, of the start {_text(start)}")


def _refused_keys() -> Iterator[str]:
    path = env.parameter_server_keys()
    if path is not None:
        try:
            Keys.load(path)
        except (OSError, ValueError) as error:
            yield f"TFSTYLE_PS_KEYS={path!r}: {error}"


def _text(limit: timedelta | None) -> str:
    return "none" if limit is None else f"{limit.total_seconds():g} s"


def find_cluster() -> tuple[ClusterResolver | None, list[Finding]]:
    """The resolver that a strategy would use, and what is wrong with it."""
    try:
        resolver = resolver_from_environment()
        spec = resolver.cluster_spec()
        if not spec and (trouble := missing_cluster()):
            return None, [problem("cluster", trouble, "correct TF_CONFIG: each task would be a job of one worker")]
        if not spec:
            return None, [ok("cluster", "neither TF_CONFIG nor a launcher: a job started here has one worker")]
        roles.check(spec, resolver.task_type, resolver.task_id)
        for task in [] if isinstance(resolver, TorchrunClusterResolver) else roles.tasks(spec):
            network.parse_address(task.address)
    except (ValueError, TypeError, RuntimeError) as error:
        return None, [problem("cluster", str(error), "correct TF_CONFIG, or the launcher's variables")]
    mine = f"this is {resolver.task_type} {resolver.task_id}"
    counts = ", ".join(f"{spec.num_tasks(job)} {job}" for job in spec.jobs)
    return resolver, [ok("cluster", f"{type(resolver).__name__}: {counts}; {mine}")]


def reachability(resolver: ClusterResolver) -> Iterator[Finding]:
    """The rendezvous and the other tasks."""
    if isinstance(resolver, TorchrunClusterResolver):
        yield from _torchrun()
        return
    spec = resolver.cluster_spec()
    own = (resolver.task_type, resolver.task_id)
    # The chief of parameter servers calls the others, and nobody calls it.
    listeners = roles.tasks(spec, "ps", "worker") if "ps" in spec.jobs else roles.tasks(spec, "chief", "worker")[:1]
    places = {task: network.parse_address(task.address) for task in roles.tasks(spec)}
    elsewhere = [str(task) for task, (host, _) in places.items() if not network.is_own_address(host)]
    if elsewhere and (loopback := [str(task) for task in listeners if is_loopback(places[task][0])]):
        yield problem(
            "peers",
            f"{', '.join(loopback)}: every host takes this address for its own, but there is also {elsewhere[0]}",
            "write the name or address that the other hosts know it by, the same on all tasks",
        )
    for task, (host, port) in places.items():
        if (task.type, task.index) == own:
            yield from _own_place(task, host, port, task in listeners)
        else:
            yield _peer(str(task), host, port)


def _own_place(task: roles.Task, host: str, port: int, listens: bool) -> Iterator[Finding]:
    owner = network.port_owner(port)
    if listens and owner:
        yield problem("ports", f"{task}: port {port} is in use by {owner}", "end that process, or choose another port")
    elif listens:
        yield ok("ports", f"{task}: port {port} is free")
    if not network.is_own_address(host):
        passed_on = network.addresses_of(host) not in ([], [host])  # perhaps, as the name of a Kubernetes Service is
        yield (problem if listens and not passed_on else warning)(
            "ports",
            f"this is {task}, but no interface of this host has that address",
            "write this host's name or address, the same on all tasks, or correct the index of the task",
        )


def _peer(name: str, host: str, port: int) -> Finding:
    trouble = network.try_connect(host, port, _CONNECT_SECONDS)
    if trouble is None:
        return ok("peers", f"{name} answers")
    if "refused" in trouble:
        return ok("peers", f"{name}: the host can be reached; nothing listens there yet")
    return problem(
        "peers", f"{name}: {trouble}", "check the address in the cluster, the network and the firewall of that host"
    )


def _torchrun() -> Iterator[Finding]:
    launch, address = launch_env.launch(), launch_env.master_address()
    if launch_env.rendezvous_file() is not None:
        yield ok("peers", f"the workers meet in the file {launch_env.rendezvous_file()}")
    elif address is None or launch is None:
        yield problem("peers", "RANK is set, but not MASTER_ADDR and MASTER_PORT", "start the script with torchrun")
    elif launch.rank > 0 or launch_env.launcher_has_store():
        yield _peer("worker 0", *address)
    elif owner := network.port_owner(address[1]):
        yield problem("ports", f"MASTER_PORT={address[1]} is in use by {owner}", "choose another MASTER_PORT")
    if address and launch and launch.local_world_size < launch.world_size and is_loopback(address[0]):
        yield problem(
            "peers",
            f"MASTER_ADDR={address[0]}, but the workers are on several hosts",
            "set MASTER_ADDR to the name or address of worker 0's host",
        )


def find_tasks(resolver: ClusterResolver, seconds: float) -> Iterator[Finding]:
    """Joins the other tasks, which must run the doctor with ``--meet`` too.

    Args:
        resolver: the cluster.
        seconds: how long to wait for them.
    """
    options = CommunicationOptions(timeout_seconds=seconds)
    try:
        group = make_group(torch.device("cpu"), options, members_of(resolver))
    except Exception as error:
        yield problem("meeting", f"{type(error).__name__}: {error}", "start the doctor on all hosts at the same time")
        return
    try:
        started = time.monotonic()
        group.gather_objects(0, "ready")
        clocks = group.gather_objects(time.time(), "clocks")
        latency = time.monotonic() - started
        versions = [platform.python_version(), torch.__version__, package_version()]
        everyone = group.gather_objects(versions, "versions")
        buffer = torch.ones(_NUMBERS)
        started = time.monotonic()
        group.all_reduce(buffer, "doctor")
        rate = buffer.numel() * buffer.element_size() / (time.monotonic() - started) / 1e6
    except Exception as error:
        yield problem("meeting", f"{type(error).__name__}: {error}", "look at the doctor's output on the other hosts")
        return
    finally:
        group.close()
    if not bool((buffer == group.size).all()):
        yield problem("meeting", "the sum over the workers is wrong", "check the memory and the network of all hosts")
    yield ok("meeting", f"{group.size} workers met; a sum of {_NUMBERS * 4 // 10**6} MB ran at {rate:.0f} MB/s")
    skew = max(clocks) - min(clocks)
    if skew > _SKEW_SECONDS + latency:
        late = [f"worker {rank} {clock - clocks[0]:+.1f} s" for rank, clock in enumerate(clocks)]
        yield warning("clocks", f"clocks differ: {', '.join(late)}", "synchronise them (NTP): logs will not line up")
    else:
        yield ok("clocks", f"clocks agree to {max(skew, latency):.3f} s")
    different = [f"worker {rank}: {' / '.join(other)}" for rank, other in enumerate(everyone) if other != everyone[0]]
    if different:
        yield problem(
            "versions",
            f"Python / torch / tfstyle_dist differ from worker 0's {' / '.join(everyone[0])}: {'; '.join(different)}",
            "install the same versions on all hosts",
        )
