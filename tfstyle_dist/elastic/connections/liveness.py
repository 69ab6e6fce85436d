"""Where a worker listens, and whether the process of another one is surely gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from tfstyle_dist.core import processes
from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.core.network import port_owner
from tfstyle_dist.elastic.connections.address_lookup import Address, AddressLookup
from tfstyle_dist.shm.namespaces import boot_id, pid_namespace


def listen(worker: int, address: Address) -> socket.socket:
    """A socket at a worker's own address.

    Raises:
        UnavailableError: it is in use, or is not this host's.
    """
    host, port = address
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise UnavailableError(
            f"Worker {worker} cannot listen at its own address {host}:{port}: {error.strerror}"
            f"{'' if (owner := port_owner(port)) is None else f' (in use by {owner})'}. In an elastic job every "
            "worker needs its own free port on its own host; change its address in TF_CONFIG on all workers."
        ) from error


def place() -> str:
    """Where process numbers mean the same; of this process alone where that cannot be told."""
    boot, pids = boot_id(), pid_namespace()
    return f"{boot} {pids}" if boot and pids else f"{socket.gethostname()} {os.getpid()}"


def is_gone(peer: Mapping[str, Any], here: str, meant: bool, lookup: AddressLookup) -> bool:
    """Whether the process at the other end of a connection that has ended is surely gone, as far as is known now.

    Args:
        peer: what it said of itself.
        here: the ``place`` of this process.
        meant: whether the connection was closed on purpose, which says nothing about the process.
        lookup: of the address where the other end listens.
    """
    if peer.get("place") == here:  # on this host its number says so
        return not processes.lives(peer.get("pid"))
    return not meant and lookup.refused(peer.get("life"))


def is_stopped(pid: Any) -> bool:
    """Whether a process of this host was stopped by a signal (SIGSTOP, Ctrl-Z); one in a debugger was not."""
    return processes.state(pid) == "T"
