"""Undoing what a test left behind in a rank process."""

from __future__ import annotations

import gc
import os
import sys
import threading
from dataclasses import dataclass

from tfstyle_dist.testing import processes

_PATIENCE = 1.0


@dataclass(frozen=True)
class RankState:
    """What a rank process looked like before a test.

    Attributes:
        environment: The environment variables.
        cwd: The working directory.
        threads: The threads that were alive.
        children: The direct child processes.
    """

    environment: dict[str, str]
    cwd: str
    threads: frozenset[threading.Thread]
    children: frozenset[int]

    @classmethod
    def now(cls) -> RankState:
        """Returns the present state."""
        return cls(
            environment=dict(os.environ),
            cwd=os.getcwd(),
            threads=frozenset(threading.enumerate()),
            children=frozenset(processes.children(os.getpid())),
        )

    def close_groups(self) -> None:
        """Destroys the process groups of torch.distributed, if any."""
        # A test that never imported it must not pay for the import here.
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()

    def restore(self) -> list[str]:
        """Brings this state back as far as possible.

        Returns:
            What is left and makes the process unfit for another test; empty if nothing is.
        """
        self.close_groups()
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.environment)
        # pytest keeps the last failure here, and with it every object of its frames.
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            if hasattr(sys, name):
                delattr(sys, name)
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)
        return processes.left_after(_PATIENCE, self._leftovers)

    def _leftovers(self) -> list[str]:
        threads = [
            f"thread {thread.name}"
            for thread in threading.enumerate()
            if thread not in self.threads and not thread.daemon
        ]
        children = processes.children(os.getpid()) - self.children
        return threads + [f"child process {pid}" for pid in sorted(children)]
