"""Workers and parameter servers on this machine, started by the program that uses them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence

from tfstyle_dist.cluster_resolver import ClusterSpec
from tfstyle_dist.cluster_resolver.simple import SimpleClusterResolver
from tfstyle_dist.core import launch_env, network
from tfstyle_dist.core.logging import get_logger

_HOST = "127.0.0.1"
# A task ends when nobody holds the other end of its input any more, however the program ended, and with it what it has
# forked, such as the workers of a DataLoader. It reads the descriptor: a child that was forked closes sys.stdin, and
# would wait for ever for the lock of a thread that reads that. One whose strategy was closed is there for the next one
# of the program.
_TASK = """
import os, signal, threading
def end_with_the_program():
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGTERM)
    os._exit(0)
threading.Thread(target=end_with_the_program, daemon=True).start()
import tfstyle_dist
me = tfstyle_dist.cluster_resolver.TFConfigClusterResolver()
while True:
    tfstyle_dist.Server(me.cluster_spec(), me.task_type, me.task_id).join()
"""
_END_SECONDS = 10.0


class LocalCluster(SimpleClusterResolver):
    """The tasks ``worker`` and ``ps`` of a cluster on this machine, for one program; a context manager.

    It is the resolver to make the strategy with; once that is closed, the next one can be made with it, which finds
    nothing of what the tasks held. The tasks end with the block, with ``close()`` or with the program.
    Only processes of this machine can talk to them; set ``TFSTYLE_PS_KEYS`` where other users of it should not.

    Args:
        workers: how many tasks run functions.
        ps: how many tasks hold variables.

    Raises:
        ValueError: there is not at least one of each.

    Example:
        >>> with LocalCluster(workers=2, ps=1) as cluster:
        ...     strategy = ParameterServerStrategy(cluster)
    """

    def __init__(self, workers: int = 2, ps: int = 1) -> None:
        for name, count in (("workers", workers), ("ps", ps)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"local_cluster needs at least one task of each kind, got {name}={count!r}.")
        ports = iter(network.free_ports(workers + ps, _HOST))
        addresses = {
            job: [f"{_HOST}:{next(ports)}" for _ in range(count)] for job, count in (("worker", workers), ("ps", ps))
        }
        super().__init__(ClusterSpec(addresses), task_type="chief", task_id=0)
        self._tasks = [
            _start(addresses, job, index, workers) for job in addresses for index in range(len(addresses[job]))
        ]
        self._finalizer = weakref.finalize(self, _end, self._tasks)
        get_logger().info("started %d worker(s) and %d parameter server(s) on this machine", workers, ps)

    @property
    def pids(self) -> list[int]:
        """The process ids of the tasks: the workers', then the servers'."""
        return [task.pid for task in self._tasks]

    def close(self) -> None:
        """Ends the tasks; what they hold is gone."""
        self._finalizer()

    def __enter__(self) -> LocalCluster:
        """Returns the resolver."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the tasks."""
        self.close()


def _start(addresses: dict[str, list[str]], job: str, index: int, sharing: int) -> subprocess.Popen[bytes]:
    tf_config = json.dumps({"cluster": addresses, "task": {"type": job, "index": index}})
    environment = launch_env.for_task(tf_config, sharing, None)
    # A session of its own: Ctrl-C in a notebook's cell is for the cell.
    return subprocess.Popen(
        [sys.executable, "-c", _TASK], env=environment, stdin=subprocess.PIPE, start_new_session=True
    )


def _end(tasks: Sequence[subprocess.Popen[bytes]]) -> None:
    for task in tasks:
        if task.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.pid, signal.SIGTERM)  # what it has forked too
        if task.stdin is not None:
            task.stdin.close()
    for task in tasks:
        try:
            task.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.pid, signal.SIGKILL)
            task.wait()
