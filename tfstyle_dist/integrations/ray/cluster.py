"""``parameter_server_cluster``: the tasks of a parameter server cluster, placed and restarted by Ray."""

from __future__ import annotations

import contextlib
import time
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfstyle_dist.cluster_resolver import ClusterSpec, SimpleClusterResolver
from tfstyle_dist.core import env
from tfstyle_dist.core.errors import DeadlineExceededError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.integrations.ray.keys import GeneratedKey
from tfstyle_dist.integrations.ray.task import Directory, ParameterServerTask
from tfstyle_dist.integrations.ray.upstream import (
    GetTimeoutError,
    PlacementGroupSchedulingStrategy,
    RayError,
    placement_group,
    ray,
    remove_placement_group,
)

_POLITE_SECONDS = 5.0
_generated_key = GeneratedKey()


class RayCluster(SimpleClusterResolver):
    """The tasks ``worker`` and ``ps`` of a cluster on Ray: the resolver to make the strategy with; a context manager.

    ``parameter_server_cluster`` makes it.

    Args:
        workers: how many tasks run functions.
        ps: how many tasks hold variables.
        resources: what each task of a job takes, in Ray's words.
        max_restarts: how often Ray starts a lost task again; -1: always.
        runtime_env: of the tasks, as for ``ray.remote``.
        start_seconds: how long to wait for room in the Ray cluster and for the tasks.
    """

    def __init__(
        self,
        workers: int,
        ps: int,
        resources: Mapping[str, Mapping[str, float]],
        max_restarts: int,
        runtime_env: Mapping[str, Any] | None,
        start_seconds: float,
    ) -> None:
        counts = {"worker": workers, "ps": ps}
        self._held = _Held()
        self._finalizer = weakref.finalize(self, self._held.release)
        try:
            end = time.monotonic() + start_seconds
            name = f"tfstyle-{uuid.uuid4().hex[:8]}"
            self._directory = self._held.start_directory(counts, name)
            for job, count in counts.items():
                # Servers on different hosts have different links; workers fill what is free.
                group = self._held.reserve([dict(resources[job])] * count, "SPREAD" if job == "ps" else "PACK", end)
                for index in range(count):
                    options = {
                        "name": f"{name}-{job}-{index}",
                        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
                        "max_restarts": max_restarts,
                        "max_task_retries": max_restarts,
                        **_as_options(resources[job]),
                        **({} if runtime_env is None else {"runtime_env": dict(runtime_env)}),
                    }
                    actor = ray.remote(ParameterServerTask).options(**options)
                    self._held.actors[job].append(actor.remote(job, index, name))
            calls = {job: [actor.enter.remote() for actor in actors] for job, actors in self._held.actors.items()}
            addresses = {job: _answers(entered, job, end) for job, entered in calls.items()}
            told = ray.put(addresses)
            calls = {job: [actor.start.remote(told) for actor in actors] for job, actors in self._held.actors.items()}
            for job, started in calls.items():
                _answers(started, job, end)
            self._serving = [actor.serve.remote(told) for actors in self._held.actors.values() for actor in actors]
        except BaseException:
            self._finalizer()
            raise
        super().__init__(ClusterSpec(addresses), task_type="chief", task_id=0)
        get_logger().info("Ray placed %d worker(s) and %d parameter server(s)", workers, ps)

    def tasks(self) -> list[dict[str, Any]]:
        """What is known of each task: ``name``, ``address``, ``pid``, ``node`` (its host) and ``lives``.

        ``lives`` is 1 for a task that was never started again. The workers come first, then the servers.

        Raises:
            UnavailableError: the program has called ``ray.shutdown()``, and the tasks are gone.
        """
        if not ray.is_initialized():  # else the question would start a new Ray
            raise UnavailableError(
                "RayCluster.tasks() was called after ray.shutdown(), which has ended the tasks. Call it before."
            )
        known = ray.get(self._directory.tasks.remote())
        return [entry for job in ("worker", "ps") for entry in known[job] if entry is not None]

    def close(self) -> None:
        """Ends the tasks and gives their room back; what they hold is gone. Close the strategy before."""
        if ray.is_initialized():  # else the question would start a new Ray
            with contextlib.suppress(RayError):
                ray.wait(self._serving, num_returns=len(self._serving), timeout=_POLITE_SECONDS if self._ended() else 0)
        self._finalizer()

    def _ended(self) -> bool:
        """Whether one of the tasks has been told to end: then all have."""
        return bool(ray.wait(self._serving, num_returns=1, timeout=1.0)[0])

    def __enter__(self) -> RayCluster:
        """Returns the resolver."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the tasks."""
        self.close()


class _Held:
    """What a cluster holds of Ray and of this process."""

    def __init__(self) -> None:
        self.actors: dict[str, list[Any]] = {"worker": [], "ps": []}
        self._directory: Any = None
        self._groups: list[Any] = []
        self._has_generated_key = False

    def _use_key(self) -> bytes | None:
        """The cluster's key: the one that the user gave, else the generated one, which this process uses too."""
        given = env.parameter_server_keys()
        if given is None and env.insecure_parameter_server():
            return None
        key = _generated_key.take()
        self._has_generated_key = key is not None
        return Path(str(given)).read_bytes() if key is None else key

    def start_directory(self, counts: Mapping[str, int], name: str) -> Any:
        """The actor that knows where the tasks are, and the key; it needs no room."""
        self._directory = ray.remote(Directory).options(num_cpus=0, name=name).remote(dict(counts), self._use_key())
        return self._directory

    def reserve(self, bundles: list[dict[str, float]], strategy: str, end: float) -> Any:
        """Room for some tasks.

        Raises:
            DeadlineExceededError: there is none by then.
        """
        group = placement_group(bundles, strategy=strategy)
        self._groups.append(group)
        if not group.wait(max(end - time.monotonic(), 0.1)):
            raise DeadlineExceededError(
                f"Ray has no room for {len(bundles)} task(s) of {bundles[0]}: it has {ray.cluster_resources()} in "
                f"all, of which {ray.available_resources()} are free. Ask for less (worker_resources=, "
                "ps_resources=), add nodes to the Ray cluster, or allow more time with start_seconds=."
            )
        return group

    def release(self) -> None:
        """Ends all."""
        if self._has_generated_key:
            self._has_generated_key = False
            _generated_key.give_back()
        if ray.is_initialized():
            for actor in (*self.actors["worker"], *self.actors["ps"], self._directory):
                if actor is not None:
                    with contextlib.suppress(RayError):
                        ray.kill(actor, no_restart=True)
            for group in self._groups:
                with contextlib.suppress(RayError):
                    remove_placement_group(group)


def parameter_server_cluster(
    workers: int = 2,
    ps: int = 1,
    *,
    worker_resources: Mapping[str, float] | None = None,
    ps_resources: Mapping[str, float] | None = None,
    max_restarts: int = -1,
    runtime_env: Mapping[str, Any] | None = None,
    start_seconds: float = 300.0,
) -> RayCluster:
    """The tasks of a parameter server cluster as Ray actors; the driver, which calls this, is the coordinator.

    Ray places the tasks (servers on as many hosts as it can), and starts a lost one again: a worker takes part again, a
    server goes on from its snapshots (``ParameterServerStrategy(snapshot_folder=...)``, on a disk that the host keeps).
    The tasks get a key of their own through an actor of Ray, unless ``TFSTYLE_PS_KEYS`` names one in the driver.

    Args:
        workers: how many tasks run functions.
        ps: how many tasks hold variables.
        worker_resources: what a worker takes, e.g. ``{"CPU": 4, "GPU": 1}``; default: ``{"CPU": 1}``.
        ps_resources: what a server takes; default: ``{"CPU": 1}``.
        max_restarts: how often Ray starts a lost task again; -1: always.
        runtime_env: of the tasks, as for ``ray.remote``, e.g. ``{"env_vars": {"TFSTYLE_PS_TCP": "always"}}``.
        start_seconds: how long to wait for room in the Ray cluster and for the tasks.

    Returns:
        The resolver to make the strategy with; a context manager. The tasks end with the block, ``close()`` or the
        driver.

    Raises:
        ValueError: there is not at least one task of each kind, or a number is wrong.
        DeadlineExceededError: there is no room in the Ray cluster, or a task does not start.

    Example:
        >>> with parameter_server_cluster(workers=4, ps=2, worker_resources={"CPU": 1}) as cluster:
        ...     strategy = ParameterServerStrategy(cluster, snapshot_folder="/data/job1/snapshots")
        ...     coordinator = ClusterCoordinator(strategy)

    Not in TensorFlow.
    """
    for name, count in (("workers", workers), ("ps", ps)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(
                f"parameter_server_cluster needs at least one task of each kind, got {name}={count!r}; write e.g. "
                "parameter_server_cluster(workers=4, ps=2)."
            )
    if not isinstance(max_restarts, int) or max_restarts < -1:
        raise ValueError(f"max_restarts={max_restarts!r}: write how often Ray may start a task again, or -1: always.")
    if not start_seconds > 0:
        raise ValueError(f"start_seconds={start_seconds!r}: write a number of seconds above 0.")
    resources = {
        "worker": {"CPU": 1.0} if worker_resources is None else worker_resources,
        "ps": {"CPU": 1.0} if ps_resources is None else ps_resources,
    }
    return RayCluster(workers, ps, resources, max_restarts, runtime_env, start_seconds)


def _as_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options of an actor that takes these resources."""
    others = {name: count for name, count in resources.items() if name not in ("CPU", "GPU", "memory")}
    options: dict[str, Any] = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
    if "memory" in resources:
        options["memory"] = resources["memory"]
    return options | ({"resources": others} if others else {})


def _answers(calls: list[Any], job: str, end: float) -> list[str]:
    """What tasks answer.

    Raises:
        DeadlineExceededError: one does not.
    """
    try:
        return list(ray.get(calls, timeout=max(end - time.monotonic(), 0.1)))
    except GetTimeoutError:
        late = [index for index, call in enumerate(calls) if not ray.wait([call], timeout=0)[0]]
        raise DeadlineExceededError(
            f"Ray did not start task(s) {late} of job {job!r} in time. Look at Ray's logs of them "
            "(/tmp/ray/session_latest/logs, or the dashboard), or allow more time with start_seconds=."
        ) from None
