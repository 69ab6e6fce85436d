"""Where a process runs, and what another one can see of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from tfstyle_dist.comm.peers import stacks
from tfstyle_dist.core import processes
from tfstyle_dist.shm.namespaces import host_and_boot, pid_namespace


@dataclass(frozen=True)
class Peer:
    """Where a worker runs.

    Attributes:
        rank: its number.
        pid: its process id.
        host: its host name.
        boot: the host's boot id, which tells hosts of equal names apart.
        pids: its pid namespace, in which ``pid`` counts.
        stacks: where it shows its Python stacks; empty if it does not.
    """

    rank: int
    pid: int
    host: str
    boot: str
    pids: str
    stacks: str

    @classmethod
    def of(cls, rank: int, facts: Sequence[Any]) -> Peer:
        """The worker that gave these ``facts``."""
        return cls(rank, *facts)

    @property
    def facts(self) -> list[Any]:
        """What others need to know, without the rank: numbers and text."""
        return list(astuple(self))[1:]

    @property
    def is_here(self) -> bool:
        """Whether it runs on this host, perhaps in another container."""
        return (self.host, self.boot) == host_and_boot()

    def visible(self) -> bool:
        """Whether its process can be seen from here: it runs on this host, and not in another container."""
        return self.is_here and self.pids != "" and self.pids == pid_namespace()

    def state(self) -> str:
        """What this process can see of it: dead, stopped, running, or that it is elsewhere."""
        if not self.is_here:
            return f"on host {self.host}, not visible from here"
        if not self.visible():
            return "in another container of this host (another pid namespace), not visible from here"
        said = {"": "dead", "Z": "dead", "X": "dead", "T": "stopped (SIGSTOP)", "t": "stopped by a debugger"}
        return said.get(processes.state(self.pid), "running")

    def stack(self) -> str | None:
        """Its Python stack; ``None``: it does not show it, or not to this process."""
        return stacks.ask(self.stacks) if self.stacks and self.is_here else None


def this_peer(rank: int) -> Peer:
    """This process as others see it."""
    host, boot = host_and_boot()
    return Peer(rank, os.getpid(), host, boot, pid_namespace(), stacks.socket_name())
