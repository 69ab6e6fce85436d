"""Elastic jobs under Ray Train: Ray starts a lost worker alone again, and it joins the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfstyle_dist.core import launch_env, network
from tfstyle_dist.core.errors import PeerLostError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.integrations.ray.upstream import GetTimeoutError, RayError, get_node_ip_address, ray, ray_train

if TYPE_CHECKING:
    from tfstyle_dist.integrations.ray.train import TfdConfig

_train, Backend, _TorchConfig = ray_train()
_PATIENCE_SECONDS = 5.0


def check_ray() -> None:
    """Whether this Ray can replace single workers.

    Raises:
        NotImplementedError: it always starts all of them again.
    """
    if not hasattr(Backend, "has_replica_groups"):
        raise NotImplementedError(
            "TfdConfig(elastic=True) needs a Ray Train that starts a lost worker alone again, and that of Ray "
            f"{ray.__version__} starts all workers again. Install a newer one (2.60 can), or write TfdConfig() and "
            "restore a checkpoint."
        )


class JobEnd:
    """Knows whether a worker of the job has come to the end; an actor of its own."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def tell(self) -> None:
        """A worker has come to the end."""
        self._ended.set()

    async def wait(self) -> None:
        """Waits until one has."""
        await self._ended.wait()


class TfdElasticBackend(Backend):  # type: ignore[misc, valid-type]
    """Tells Ray's workers who they are, in ``TF_CONFIG``, and those that are started again too; made by Ray."""

    has_replica_groups = True  # Ray starts a lost worker alone again, in the room that it had

    def on_start(self, worker_group: Any, backend_config: TfdConfig) -> None:
        """Chooses the workers' addresses, or gives a worker that is started again the one that it had.

        Args:
            worker_group: all workers, or the one that is started again.
            backend_config: the user's.

        Raises:
            UnavailableError: Ray has started a worker again on another host.
        """
        members = range(len(worker_group))
        places = ray.get([worker_group.execute_single_async(member, _place) for member in members])
        again = len(places) < places[0][1]
        if again:
            self._check_hosts(places)
        else:
            self._addresses = _addresses(worker_group, [host for _, _, host in places])
            self._end = ray.remote(JobEnd).options(num_cpus=0).remote()
        told = (self._addresses, self._end, again, backend_config.timeout_seconds)
        ray.get([worker_group.execute_single_async(m, _enter, rank, *told) for m, (rank, _, _) in enumerate(places)])

    def _check_hosts(self, places: list[tuple[int, int, str]]) -> None:
        for rank, _, host in places:
            if network.parse_address(before := self._addresses[rank])[0] != host:
                raise UnavailableError(
                    f"Ray has started worker {rank} again on {host}, but the other workers know it at {before}: its "
                    "host is gone. Start the program again from a checkpoint."
                )


def _place() -> tuple[int, int, str]:
    """This worker's number, how many there are, and its host."""
    context = _train.get_context()
    return context.get_world_rank(), context.get_world_size(), get_node_ip_address()


def _addresses(worker_group: Any, hosts: list[str]) -> list[str]:
    """An address for each worker, in their order."""
    ports = {}
    for host in set(hosts):  # one worker of each host asks for all of it, so that no two get the same
        ports[host] = worker_group.execute_single(hosts.index(host), network.free_ports, hosts.count(host), host)
    return [f"{host}:{ports[host].pop()}" for host in hosts]


# ---- in the worker --------------------------------------------------------------------------------------------------

_end: Any = None
_again = False


def _enter(rank: int, addresses: list[str], end: Any, again: bool, timeout_seconds: float | None) -> None:
    global _end, _again
    _end, _again = end, again
    cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    launch_env.set_elastic_task(json.dumps(cluster), timeout_seconds)
    threading.Thread(target=_note_the_end, args=(end,), name="tfstyle-ray-end", daemon=True).start()


def _note_the_end(end: Any) -> None:
    with contextlib.suppress(RayError):  # Ray ends
        ray.get(end.wait.remote())
        launch_env.set_job_has_ended()


@contextlib.contextmanager
def around_training() -> Iterator[None]:
    """What Ray does around the training function, and: who comes to the end says so to those that come late."""
    with _TorchConfig().train_func_context():
        try:
            yield
        except PeerLostError as error:
            if not (_again and _has_ended()):
                raise
            get_logger().warning("%s", error)
        else:
            ray.get(_end.tell.remote())


def _has_ended() -> bool:
    try:
        ray.get(_end.wait.remote(), timeout=_PATIENCE_SECONDS)
    except GetTimeoutError:
        return False
    return True
