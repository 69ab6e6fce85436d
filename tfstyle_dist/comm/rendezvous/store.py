"""The key-value store at which the processes of a group find each other."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from tfstyle_dist.comm.peers.diagnosis import SideChannel
from tfstyle_dist.comm.rendezvous.members import Members
from tfstyle_dist.comm.rendezvous.rendezvous import Rendezvous
from tfstyle_dist.core import launch_env, network
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import DeadlineExceededError, UnavailableError

_FOREVER = timedelta(days=365)
_counts: dict[str, int] = {}  # of the rendezvous of this process, by their store


def open_store(members: Members, limit: timedelta | None) -> tuple[Any, SideChannel]:
    """Opens a store that all workers share, once all of them have come.

    Args:
        members: the workers.
        limit: how long to wait for them; ``None``: without end.

    Returns:
        The store, with nothing of another group in it, and the same store for messages about failures.

    Raises:
        ValueError: nothing says where the store is, or the workers were told different clusters.
        DeadlineExceededError: a worker did not come in time.
        PeerLostError: a worker died or gave up.
        UnavailableError: the store cannot be opened or used.
    """
    import torch.distributed as dist

    deadline = Deadline(limit)
    path = launch_env.rendezvous_file()
    agent = launch_env.launcher_has_store()
    if path is not None:
        store: Any = dist.FileStore(path, members.size)
    elif members.address is not None:
        store = _network_store(members, members.address, deadline, serve=members.rank == 0 and not agent)
    else:
        raise ValueError(
            f"RANK={members.rank} and WORLD_SIZE={members.size} are set, but neither MASTER_ADDR and MASTER_PORT nor "
            "TFSTYLE_RENDEZVOUS_FILE says where the workers meet. Start the script with torchrun, or unset RANK and "
            "WORLD_SIZE to run one process."
        )
    # What an earlier strategy of this process left in the store must not be taken for this one's.
    where = str(path or members.address)
    _counts[where] = _counts.get(where, 0) + 1
    own = dist.PrefixStore(f"tfstyle/{_counts[where]}", store)
    rendezvous = Rendezvous(own, members, deadline, lasting=path is not None or agent)
    store = dist.PrefixStore(f"tfstyle/{rendezvous.wait()}", store)
    return store, SideChannel(store, None if rendezvous.lasting else rendezvous.leader)


def _network_store(members: Members, address: tuple[str, int], deadline: Deadline, serve: bool) -> Any:
    """The store at an address; the one that worker 0 opens does not wait for the others yet."""
    import torch.distributed as dist

    host, port = address
    limit = deadline.limit or _FOREVER
    if not serve:
        _wait_for_listener(members, address, deadline)
    try:
        return dist.TCPStore(host, port, members.size, serve, limit, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        said = str(error).strip().partition("\n")[0]
        if serve and "EADDRINUSE" in str(error):
            raise UnavailableError(
                f"Port {port} is in use by {network.port_owner(port) or 'another process'}, so {members.own_name} "
                f"cannot open the rendezvous {host}:{port}. End that process, or choose another port for "
                f"{members.own_name} on all workers."
            ) from error
        raise UnavailableError(
            f"{members.own_name} of {members.size} cannot use the rendezvous {host}:{port}: {said}. Check the "
            "address, and that nothing but this program answers there."
        ) from error


def _wait_for_listener(members: Members, address: tuple[str, int], deadline: Deadline) -> None:
    """Returns when somebody listens; waits in Python, so that Ctrl-C ends it."""
    host, port = address
    pause, problem = 0.02, ""
    while not deadline.passed():
        left = deadline.remaining()
        problem = network.try_connect(host, port, 5.0 if left is None else min(left, 5.0)) or ""
        if not problem:
            return
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)
    raise DeadlineExceededError(
        f"{members.own_name} of {members.size} did not reach {members.names[0]} at {host}:{port} within {deadline}: "
        f"{problem}. Check that {members.names[0]} runs there and that the address can be reached from here."
    )
