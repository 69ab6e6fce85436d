"""``tf.distribute.Server``: one ps or worker task of a cluster."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfstyle_dist.core import env, network
from tfstyle_dist.parameter_server.addresses import as_addresses

if TYPE_CHECKING:
    from tfstyle_dist.parameter_server.local_cluster import LocalCluster

# Of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


@dataclass(frozen=True)
class ServerDef:
    """What a server was made with.

    Attributes:
        cluster: addresses by job.
        job_name: its job.
        task_index: its number in the job.
        protocol: ``"tcp"``.
    """

    cluster: Mapping[str, list[str]]
    job_name: str
    task_index: int
    protocol: str


class Server:
    """One ps or worker task: it listens at its address and serves the coordinator (``tf.distribute.Server``).

    Args:
        server_or_cluster_def: a ``ClusterSpec``, a dict of addresses by job, or a ``ServerDef``.
        job_name: ``"ps"`` or ``"worker"``; may be left out if the cluster has one task.
        task_index: number of the task in its job; may be left out if the job has one task.
        protocol: accepted for TF's signature; it is always TCP.
        config: accepted for TF's signature.
        start: start at once; otherwise call ``start()``.

    Raises:
        ValueError: an unknown job or task, or the chief's.
        UnavailableError: the address is in use, e.g. by another task with this index.
        PermissionError: no keys, and an address that other machines can reach.

    Example:
        >>> Server(cluster_spec, job_name="ps", task_index=0).join()

    Source: ``tf.distribute.Server``.
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        given = server_or_cluster_def
        if isinstance(given, ServerDef):
            job_name = given.job_name if job_name is None else job_name
            task_index = given.task_index if task_index is None else task_index
            given = given.cluster
        cluster = as_addresses(given.as_dict() if hasattr(given, "as_dict") else given)
        job, index = _task(cluster, job_name, task_index)
        self._definition = ServerDef(cluster, job, index, "tcp")
        self._thread: threading.Thread | None = None
        self._task: Any = None
        self._error: BaseException | None = None
        if start:
            self.start()

    @staticmethod
    def local_cluster(workers: int = 2, ps: int = 1) -> LocalCluster:
        """Workers and parameter servers on this machine, for this program: a notebook trains with them in one cell.

        Args:
            workers: how many tasks run functions.
            ps: how many tasks hold variables.

        Returns:
            The resolver to make the strategy with; a context manager. The tasks end with the block or ``close()``,
            at the latest with the program.

        Raises:
            ValueError: there is not at least one of each.

        Example:
            >>> with Server.local_cluster(workers=2, ps=1) as cluster:
            ...     strategy = ParameterServerStrategy(cluster)
        """
        from tfstyle_dist.parameter_server.local_cluster import LocalCluster

        return LocalCluster(workers, ps)

    @property
    def server_def(self) -> ServerDef:
        """What this server is."""
        return self._definition

    @property
    def target(self) -> str:
        """Its address as a URL."""
        return f"tcp://{self._address}"

    @property
    def _address(self) -> str:
        return self._definition.cluster[self._definition.job_name][self._definition.task_index]

    def start(self) -> None:
        """Starts listening, in a thread of its own; nothing when it has.

        Raises:
            UnavailableError: the address is in use.
        """
        if self._thread is not None:
            return
        from tfstyle_dist.parameter_server.protocol import zeromq_sockets
        from tfstyle_dist.parameter_server.server.loop import ParameterServer

        context = zeromq_sockets.new_context()
        job, index, grace_seconds = self._definition.job_name, self._definition.task_index, env.coordinator_grace()
        try:
            if job == "ps":
                task: Any = ParameterServer(context, self._address, f"/job:ps/task:{index}", grace_seconds)
            else:
                from tfstyle_dist.coordinator.worker_task import WorkerTask

                task = WorkerTask(context, self._address, job, index, grace_seconds)
        except BaseException:
            context.close()
            raise

        def serve() -> None:
            try:
                task.run()
            except BaseException as error:
                self._error = error
            finally:
                context.close()

        self._task = task
        keep_memory()
        self._thread = threading.Thread(target=serve, name=f"tfstyle-{job}-{index}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until the coordinator ends the cluster (``strategy.close()``, or the end of its program).

        Raises:
            UnavailableError: the coordinator was there, and was then silent for ``TFSTYLE_PS_PATIENCE_SECONDS``.
            RuntimeError: the server was not started.
            Exception: what ended the server's thread, if it failed.
        """
        if self._thread is None:
            raise RuntimeError(
                "Server.join() was called before start(), so nothing is running; call start(), or make the server with "
                "start=True."
            )
        while self._thread.is_alive():
            self._thread.join(0.5)  # with a limit, so that Ctrl-C gets through
            self._task.check()
        if self._error is not None:
            raise self._error

    @staticmethod
    def create_local_server(config: Any = None, start: bool = True) -> Server:
        """A worker task of its own on a free port of this machine.

        Args:
            config: accepted for TF's signature.
            start: start at once.

        Returns:
            The server; ``target`` is its address.
        """
        return Server({"local": [f"127.0.0.1:{network.free_ports(1, '127.0.0.1')[0]}"]}, start=start)


def keep_memory() -> None:
    """Memory that this process frees stays with it: asking the kernel for it anew costs more than using it.

    Large tensors get large pages, if this process has made no tensor yet.
    """
    env.prefer_large_pages()
    gc.freeze()  # what was imported lives as long as the process
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1), (_ARENA_MAX, 1)):
            mallopt(option, value)


def _task(cluster: Mapping[str, list[str]], job: str | None, index: int | None) -> tuple[str, int]:
    if job is None:
        if len(cluster) != 1:
            raise ValueError(f"job_name is needed: the cluster has the jobs {sorted(cluster)}.")
        job = next(iter(cluster))
    if job not in cluster:
        raise ValueError(f"The cluster has no job {job!r}; its jobs are {sorted(cluster)}.")
    if job in ("chief", "evaluator"):
        raise ValueError(
            f"A {job} task does not serve: make the ParameterServerStrategy in its program (chief), or read "
            "checkpoints there (evaluator)."
        )
    if index is None:
        if len(cluster[job]) != 1:
            raise ValueError(f"task_index is needed: job {job!r} has {len(cluster[job])} tasks.")
        index = 0
    if not 0 <= index < len(cluster[job]):
        raise ValueError(f"Job {job!r} has tasks 0 to {len(cluster[job]) - 1}, not {index}.")
    return job, index
