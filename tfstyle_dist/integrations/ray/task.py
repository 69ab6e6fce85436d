"""The tasks of a parameter server cluster as Ray actors, and the actor that knows where each of them is."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from tfstyle_dist.core import env, network
from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.integrations.ray.keys import PrivateFile
from tfstyle_dist.integrations.ray.upstream import get_node_ip_address, ray


class Directory:
    """Where the tasks are; an actor of its own, which outlives each of them.

    Args:
        counts: how many tasks each job has.
        key: the cluster's key; ``None``: none.
    """

    def __init__(self, counts: Mapping[str, int], key: bytes | None) -> None:
        self._tasks: dict[str, list[dict[str, Any] | None]] = {job: [None] * count for job, count in counts.items()}
        self._key = key

    def key(self) -> bytes | None:
        """The cluster's key."""
        return self._key

    def address_before(self, job: str, index: int) -> str | None:
        """The address that a task had in its earlier life, if it had one."""
        entry = self._tasks[job][index]
        return None if entry is None else str(entry["address"])

    def enter(self, job: str, index: int, address: str, pid: int, node: str) -> None:
        """A task has begun a life."""
        entry = self._tasks[job][index]
        lives = 1 if entry is None else int(entry["lives"]) + 1
        name = f"/job:{job}/task:{index}"
        self._tasks[job][index] = {"name": name, "address": address, "pid": pid, "node": node, "lives": lives}

    def tasks(self) -> dict[str, list[dict[str, Any] | None]]:
        """What is known of each task; ``None``: it has not come yet."""
        return self._tasks


class ParameterServerTask:
    """One task ``ps`` or ``worker``.

    Ray starts it again when its process is lost, and makes the calls again that were under way: ``start``, ``serve``.

    Args:
        job: its job.
        index: its number in the job.
        directory: the name of the actor that knows where the tasks are. What a constructor gets through the object
            store may be gone when Ray starts the task again.
    """

    def __init__(self, job: str, index: int, directory: str) -> None:
        self._job, self._index, self._directory = job, index, ray.get_actor(directory)
        self._entered = False
        self._server: Any = None
        key = ray.get(self._directory.key.remote())
        if key is not None:
            self._key_file = PrivateFile(key)  # open as long as the process lives
            env.set_parameter_server_keys(self._key_file.path)

    def __repr__(self) -> str:
        return f"{self._job} {self._index}"  # what Ray puts before each line that it prints

    def enter(self) -> str:
        """Chooses the address, at the first life any free one, later the same as before.

        Raises:
            UnavailableError: Ray has started the task again on another host.
        """
        host = get_node_ip_address()
        before = ray.get(self._directory.address_before.remote(self._job, self._index))
        if before is not None and network.parse_address(before)[0] != host:
            raise UnavailableError(
                f"/job:{self._job}/task:{self._index} was started again on {host}, but the other tasks know it at "
                f"{before}: its host is gone. Start the program again from a checkpoint."
            )
        address = before or f"{host}:{network.free_ports(1, host)[0]}"
        entry = (self._job, self._index, address, os.getpid(), socket.gethostname())
        ray.get(self._directory.enter.remote(*entry))
        self._entered = True
        return address

    def start(self, cluster: Mapping[str, Sequence[str]]) -> None:
        """Listens at the address.

        Args:
            cluster: the addresses by job.
        """
        from tfstyle_dist.coordinator.server import Server

        if not self._entered:  # Ray has started the process again
            self.enter()
        self._server = Server(cluster, self._job, self._index)

    def serve(self, cluster: Mapping[str, Sequence[str]]) -> None:
        """Serves until the coordinator ends the cluster.

        Args:
            cluster: the addresses by job.
        """
        try:
            if self._server is None:  # Ray has started the process again
                self.start(cluster)
            self._server.join()
        except Exception as error:
            get_logger().error("/job:%s/task:%d has ended: %s", self._job, self._index, error)
            raise
