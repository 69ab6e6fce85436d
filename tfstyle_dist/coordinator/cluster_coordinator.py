"""``tf.distribute.coordinator.ClusterCoordinator``."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from tfstyle_dist.coordinator.closure import CoordinatorStatistics
from tfstyle_dist.coordinator.closure_queue import ClosureQueue
from tfstyle_dist.coordinator.per_worker import PerWorkerDataset, PerWorkerResource, returning
from tfstyle_dist.coordinator.pickled_functions import PickledFunctions
from tfstyle_dist.coordinator.references import Outgoing
from tfstyle_dist.coordinator.remote_value import RemoteValue
from tfstyle_dist.coordinator.worker_pool import IN_FLIGHT, WorkerPool
from tfstyle_dist.core import nest
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.parameter_server.protocol import pickling
from tfstyle_dist.strategies.arguments import check_arguments
from tfstyle_dist.strategies.parameter_server.optimizer_settings import settings_for_workers
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy


class ClusterCoordinator:
    """Schedules functions on the worker tasks of a ``ParameterServerStrategy``.

    There is one coordinator for each strategy: making a second one gives the first. A function is pickled when it is
    scheduled for the first time; variables, modules and optimizers of the strategy travel as references. If a worker
    is lost, its functions are run again elsewhere, and the writes they had made to variables are not made twice.

    Args:
        strategy: the strategy.

    Raises:
        TypeError: another kind of strategy.

    Example:
        >>> coordinator = ClusterCoordinator(strategy)
        >>> loss = coordinator.schedule(step, args=(iterator,))
        >>> coordinator.join()
        >>> loss.fetch()
        0.25

    Source: ``tf.distribute.coordinator.ClusterCoordinator``.
    """

    _tfstyle_stays_here = True

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        """The coordinator of the strategy, made once."""
        if not isinstance(strategy, ParameterServerStrategy):
            raise TypeError(
                f"ClusterCoordinator needs a ParameterServerStrategy, got {strategy!r}: only there are functions "
                "scheduled. Under other strategies call strategy.run."
            )
        if strategy.coordinator is None:
            strategy.coordinator = super().__new__(cls)
        return strategy.coordinator  # type: ignore[no-any-return]

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if hasattr(self, "_strategy"):
            return
        self._strategy = strategy
        self._queue = ClosureQueue(strategy.max_staleness)
        self._resources: dict[int, list[bytes]] = {}
        self._lock = threading.RLock()
        self._outgoing = Outgoing(strategy, self._keep_resource)
        self._functions = PickledFunctions(strategy, self._outgoing, self._lock)
        handshake = {
            "role": "coordinator", "session": strategy.session, "cluster": strategy.cluster,
            "snapshots": strategy.snapshots,
            "wire": {"bfloat16": strategy.wire_options.dtype is not None, "ahead": strategy.wire_options.ahead},
        }  # fmt: skip
        try:
            # The servers must know the session before a worker asks.
            strategy.servers.call_all({"method": "statistics"})
        except BaseException:
            strategy.coordinator = None
            raise
        self._pool = WorkerPool(
            strategy.context, strategy.cluster["worker"], strategy.cluster["ps"], handshake, self._queue,
            self._functions.parts, self._resources,
            # A call that waits at its worker counts as one at work.
            IN_FLIGHT if strategy.max_staleness is None or strategy.wire_options.ahead else 1,
        )  # fmt: skip
        atexit.register(_close_at_exit, weakref.ref(strategy), weakref.ref(self._pool))

    @property
    def next_number(self) -> int:
        """Of the next function that is scheduled."""
        return self._queue.next_number

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    # ---- scheduling -------------------------------------------------------------------------------------------

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        worker: int | None = None,
    ) -> RemoteValue:
        """Runs ``fn(*args, **kwargs)`` on some worker, some time; returns at once.

        On the worker the strategy is in force, in cross-replica context; ``strategy.run`` in ``fn`` works as usual with
        one replica. Any Python function will do.

        Args:
            fn: the function.
            args: positional arguments; a per-worker iterator or ``PerWorkerValues`` arrives as the worker's own one, a
                ``RemoteValue`` of this coordinator as its value, for which the function waits.
            kwargs: keyword arguments.
            worker: number of the only worker that may run it; ``None``: any.

        Returns:
            The result to come.

        Raises:
            TypeError: ``fn`` cannot be called, or something cannot be sent to another process.
            ValueError: a ``RemoteValue`` of another coordinator or inside ``fn``, or a worker that does not exist.
            Exception: the error of an earlier function that ``join`` or ``done`` has not raised yet, or of the function
                whose ``RemoteValue`` is among the arguments.

        Example:
            >>> coordinator.schedule(lambda x: x + 1, args=(2,)).fetch()
            3
        """
        given = args if isinstance(args, str | bytes) or hasattr(args, "shape") else tuple(args or ())
        arguments, keywords = check_arguments(fn, given, dict(kwargs or {}), "ClusterCoordinator.schedule")
        if worker is not None and not 0 <= worker < len(self._strategy.cluster["worker"]):
            raise ValueError(
                f"worker={worker}, but the workers are 0 to {len(self._strategy.cluster['worker']) - 1}; give one of "
                "these, or leave worker= out for any."
            )
        number = self._functions.number(fn)
        parts, values = list[bytes](), list[RemoteValue]()
        if arguments or keywords:
            with self._lock:
                self._outgoing.values = values
                try:
                    parts = [bytes(p) for p in pickling.dumps((tuple(arguments), keywords), self._outgoing)]
                finally:
                    self._outgoing.values = None
            if any(not value.belongs_to(self._queue.changed) for value in values):
                raise ValueError("A RemoteValue among the arguments belongs to another coordinator; fetch() it first.")
        result = self._queue.put(number, parts, worker, values, settings_for_workers(self._strategy))
        self._pool.wake()
        return result

    def join(self, timeout: float | None = None) -> None:
        """Waits until all scheduled functions are finished.

        When no worker is there it waits for one to come back and says so in the log.

        Args:
            timeout: seconds to wait; ``None``: without limit.

        Raises:
            Exception: the first error of a function since the last one that was raised; functions that were waiting
                then are cancelled.
            UnavailableError: a parameter server was lost.
            DeadlineExceededError: not finished in time; the message names the workers that are not there.
        """
        self._queue.wait(Deadline(None if timeout is None else timedelta(seconds=timeout)), self._pool.absent)

    def done(self) -> bool:
        """Whether all scheduled functions are finished; does not wait.

        Raises:
            Exception, UnavailableError: as for ``join``.

        Example:
            >>> coordinator.join()
            >>> coordinator.done()
            True
        """
        return self._queue.done()

    def fetch(self, val: Any) -> Any:
        """Waits for the results in a nest.

        Args:
            val: a nest; each ``RemoteValue`` in it is replaced by its ``fetch()``, anything else stays.

        Returns:
            The nest with the results, NumPy arrays and numbers in place of tensors.

        Raises:
            Exception: what a function raised, or CancelledError.

        Example:
            >>> results = [coordinator.schedule(lambda x: x + 1, args=(n,)) for n in range(2)]
            >>> coordinator.fetch(results)
            [1, 2]
        """
        return nest.map_structure(lambda v: v.fetch() if isinstance(v, RemoteValue) else v, val)

    def statistics(self) -> CoordinatorStatistics:
        """How many functions wait, run and have finished, and how stale their parameters were.

        Example:
            >>> coordinator.statistics()
            CoordinatorStatistics(waiting=..., running=..., finished=..., staleness=...)
        """
        return self._queue.statistics()

    # ---- per-worker data --------------------------------------------------------------------------------------

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any] | Any) -> PerWorkerDataset:
        """A dataset of which each worker has its own, whole copy.

        Args:
            dataset_fn: called on each worker when it first needs the data, and again on a worker that was restarted;
                or a dataset that can be pickled, or a distributed one of the strategy.

        Returns:
            Something to iterate over: give ``iter(...)`` of it to ``schedule``.

        Raises:
            TypeError: ``dataset_fn`` cannot be sent to another process.

        Example:
            >>> iterator = iter(coordinator.create_per_worker_dataset(lambda: [0.25, 0.5]))
            >>> coordinator.schedule(next, args=(iterator,)).fetch()
            0.25

        Source: ``tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset``.
        """
        dataset = PerWorkerDataset(dataset_fn if callable(dataset_fn) else returning(dataset_fn))
        self._keep_resource(dataset)
        return dataset

    def create_per_worker_resource(self, factory: Callable[[], Any]) -> PerWorkerResource:
        """Something that each worker makes once for itself, such as an open file or a model that is not trained.

        Args:
            factory: called on each worker when it is first needed, and again on a worker that was restarted.

        Returns:
            What stands for it among the arguments of ``schedule``: the function gets the worker's own.

        Raises:
            TypeError: ``factory`` cannot be sent to another process.

        Example:
            >>> table = coordinator.create_per_worker_resource(lambda: {"a": 1})
            >>> coordinator.schedule(lambda table: table["a"], args=(table,)).fetch()
            1
        """
        resource = PerWorkerResource(factory)
        self._keep_resource(resource)
        return resource

    def _keep_resource(self, resource: PerWorkerResource) -> None:
        with self._lock:
            if resource.number not in self._resources:
                parts = [bytes(p) for p in pickling.dumps(resource.factory, self._outgoing)]
                self._resources[resource.number] = parts

    # ---- life -------------------------------------------------------------------------------------------------

    def close(self, end_workers: bool = True) -> None:
        """Ends the coordinator's thread; ``strategy.close()`` calls it.

        Args:
            end_workers: tells the worker tasks to end too.
        """
        self._pool.stop(end_workers)


def _close_at_exit(strategy: weakref.ref[ParameterServerStrategy], pool: weakref.ref[WorkerPool]) -> None:
    if (found := strategy()) is not None:
        found.close()
    elif (left := pool()) is not None:  # its thread goes on without the strategy
        left.leave()
