"""``MultiWorkerMirroredStrategy(elastic=...)``: logical replicas held by the workers that live."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from tfstyle_dist.cluster_resolver import ClusterResolver, TorchrunClusterResolver, roles
from tfstyle_dist.comm.single_group import SingleGroup
from tfstyle_dist.core import devices as device_names, env, nest, network
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.elastic import Elastic
from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.job import ElasticJob
from tfstyle_dist.elastic.membership.membership import Membership
from tfstyle_dist.elastic.state.dataset_positions import DatasetPositions
from tfstyle_dist.elastic.steps.local_replicas import ElasticRun, HeldContent
from tfstyle_dist.monitoring.monitor import name_of
from tfstyle_dist.monitoring.report import ElasticCounts
from tfstyle_dist.runtime.executor import ReplicaExecutor
from tfstyle_dist.runtime.turns import TurnRun
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.running import replica_function
from tfstyle_dist.values import note_result, share_of_arguments


class ElasticGroup(SingleGroup):
    """What a worker of an elastic job has in the place of a group: it looks as if it held all replicas.

    Attributes:
        job: the transactions, through which goes what the workers do together.
    """

    job: ElasticJob
    one_writes = True
    _alone = False

    @property
    def own_number(self) -> int:
        """The worker's number in the job."""
        return self.job.membership.me

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """What all workers that live tell; what this one tells where it does something for all, or is no member yet."""
        if self._alone or not self.job.membership.is_member:
            return [value]
        came = self.job.agreements.agree(name, lambda lowest: Packet({"told": value}))
        return [came[worker].header["told"] for worker in sorted(came)]

    def by_one(self, action: Callable[[], Any], name: str) -> Any:
        """The lowest worker that lives does something; all get what came of it.

        Args:
            action: what to do; its result is JSON.
            name: of the call.
        """
        done: list[Any] = []

        def mine(lowest: bool) -> Packet:
            if lowest and not done:
                self._alone = True
                # What is written may be asked of a replica that another worker computes.
                self.job.keep_written()
                self.job.refresh()
                try:
                    done.append(action())
                finally:
                    self._alone = False
            return Packet({"told": done[0] if lowest else None})

        came = self.job.agreements.agree(name, mine)
        return came[min(came)].header["told"]


class ElasticWorker(Worker):
    """A worker that may hold any of the R replicas; to everything else it looks like one process that holds all.

    Args:
        options: of the job.
        resolver: who the workers are.
        timeout: limit of each wait for another worker.

    Attributes:
        membership: the other workers.

    Raises:
        ValueError: the cluster does not fit the options.
        DeadlineExceededError: some workers did not start in time.
    """

    def __init__(self, options: Elastic, resolver: ClusterResolver, timeout: timedelta | None) -> None:
        rank, addresses = _tasks(options, resolver)
        super().__init__(
            device_names.parse_replica_devices([f"cpu:{r}" for r in range(options.replicas)]), ElasticGroup(), timeout
        )
        self.positions: DatasetPositions = DatasetPositions()
        self.membership = Membership(rank, addresses, options, timeout)
        try:
            self.membership.start(env.start_timeout(timeout))
        except BaseException:
            self.membership.close()
            raise

    def draw_seed(self) -> int:
        """A seed from torch's random numbers on the lowest worker; one that comes back gets it with the state."""
        return int(self.group.gather_objects(super().draw_seed(), "input: seed")[0])

    def close(self) -> None:
        """Leaves the job: the others go on without this worker."""
        super().close()
        self.membership.close()


class ElasticSteps:
    """Runs the steps of an elastic strategy.

    Args:
        strategy: it.
        worker: its worker.
        options: of the job.

    Attributes:
        job: the transactions.
    """

    def __init__(self, strategy: Any, worker: ElasticWorker, options: Elastic) -> None:
        self._strategy, self._worker = strategy, worker
        store, reducer = strategy.parameter_store, strategy.gradient_reducer
        self.job = ElasticJob(worker.membership, store, reducer, options, worker.positions)
        store.make_equal = self.job.agreements.make_equal
        group = worker.group
        assert isinstance(group, ElasticGroup)
        group.job = self.job
        self._executor: tuple[tuple[int, ...], ReplicaExecutor] | None = None

    def run(self, function: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> list[Any]:
        """Calls the function for each replica of this worker, until the step is committed; all replicas' results."""
        store = self._strategy.parameter_store
        store.prepare(function, (*arguments, *keywords.values()))
        try:
            given = (arguments, keywords)
            results = self.job.run(lambda: self._attempt(function, arguments, keywords), name_of(function), given)
            self._note_shares(results, arguments, keywords)
            return results
        except BaseException:
            # The others cannot wait for a worker that will not finish the step.
            self._worker.membership.close()
            raise

    def _note_shares(self, results: list[Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Notes what is noted of results where they are computed, for those that came from other workers."""
        for replica in set(range(len(results))) - set(self.job.held):
            share = share_of_arguments((*arguments, *keywords.values()), replica)
            if share is not None and share.some_empty:
                for leaf in nest.leaves(results[replica]):
                    note_result(leaf, share)

    def _attempt(self, function: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> list[Any]:
        held = self.job.held
        calls = [replica_function(self._strategy, r, function, arguments, keywords) for r in held]
        functions = [partial(self._call, call, held) for call in calls]
        with self._strategy.update_runner.same_steps(self._worker.num_replicas, held):
            return self._executor_of(held).run(functions)

    def _call(self, call: Callable[[ElasticRun], Any], held: tuple[int, ...], run: TurnRun) -> Any:
        return call(ElasticRun(run, held, self.job.joint_work))

    def _executor_of(self, held: tuple[int, ...]) -> ReplicaExecutor:
        if self._executor is None or self._executor[0] != held:
            if self._executor is not None:
                self._executor[1].close()
            executor = ReplicaExecutor([self._worker.devices[r] for r in held], self._worker.timeout)
            executor.content = HeldContent(self._strategy.parameter_store.contents, held)
            executor.one_run = self._worker.executor.one_run
            self._executor = held, executor
        return self._executor[1]

    def join(self, uses: Sequence[Any]) -> bool:
        """See ``join``."""
        store = self._strategy.parameter_store
        store.ensure_equal()
        store.prepare(None, ())
        if self.job.committed:
            raise RuntimeError(
                "tfd.experimental.join was called after strategy.run. Call it once, right before the loop over steps: "
                "a worker that comes back begins there."
            )
        for thing in uses:
            if isinstance(thing, torch.nn.Module) or not callable(thing):
                store.adopt_object(thing)
            else:
                store.prepare(thing, ())
        try:
            return self.job.join(self._worker.timeout)
        except BaseException:
            self._worker.membership.close()
            raise

    def counts(self) -> ElasticCounts:
        """What became of the steps."""
        job = self.job
        members, epochs = job.membership.members, tuple(job.epochs)
        return ElasticCounts(job.committed, job.retried, members, job.held, epochs, tuple(job.audit.found))

    def check_took_part(self) -> None:
        """Called at the end.

        Raises:
            InvalidArgumentError: this worker came back and has done no step, and no other error ends the program.
        """
        if self.job.is_new and sys.exc_info()[0] is None:
            raise InvalidArgumentError(
                "This worker came back to an elastic job that is still training, and its program came to the end "
                "without a step. Keep the numbers that the loop depends on (the epoch, the step) in tfd.Variables, "
                "read them after tfd.experimental.join(strategy), and make all datasets before it."
            )

    def close(self) -> None:
        """Ends the threads; without an error this worker has come to its end, which the others are told."""
        if self._executor is not None:
            self._executor[1].close()
        self._worker.membership.close(finished=not self.job.is_new and sys.exc_info()[0] is None)


def _tasks(options: Elastic, resolver: ClusterResolver) -> tuple[int, list[tuple[str, int]]]:
    """This worker's number and the addresses of all."""
    if not isinstance(options, Elastic):
        raise TypeError(f"elastic must be an experimental.Elastic(replicas=...), got {options!r}.")
    if isinstance(resolver, TorchrunClusterResolver):
        raise ValueError(
            "MultiWorkerMirroredStrategy(elastic=) was started by torchrun, whose agent ends the survivors when one "
            "worker dies, and which gives the workers no addresses of their own (or by Ray Train, which sets the same "
            "variables). Start the workers with python -m tfstyle_dist.launch --elastic, one by one with TF_CONFIG, or "
            "under Ray with TorchTrainer(torch_config=TfdConfig(elastic=True))."
        )
    if torch.accelerator.is_available():
        raise NotImplementedError(
            "MultiWorkerMirroredStrategy(elastic=) computes on the CPU only, and this process sees accelerators. Hide "
            "them (CUDA_VISIBLE_DEVICES=), or leave elastic= out."
        )
    tasks, rank = roles.training_tasks(resolver)
    if len(tasks) > options.replicas:
        raise ValueError(
            f"The cluster has {len(tasks)} workers and Elastic(replicas={options.replicas}): every worker holds at "
            "least one replica. Give more replicas, or start fewer workers."
        )
    if len(tasks) == 1:
        return 0, [("127.0.0.1", network.free_ports(1)[0])]
    return rank, [network.parse_address(task.address) for task in tasks]


def join(strategy: Any, *uses: Any) -> bool:
    """Says where the loop of an elastic job begins: a worker that was started again becomes a member here.

    It waits for the beginning of a step, and gets parameters, optimizers, buffers, Variables and the position of the
    datasets from the memory of the others. The next batch that it reads is the one that they read. So what the loop
    depends on, such as the number of the epoch, belongs in a ``Variable`` that is read after this call.

    Call it on all workers, once, right before the loop. With any other strategy, and at the first start, it returns at
    once.

    Args:
        strategy: a strategy.
        *uses: functions that ``strategy.run`` will get, needed if there are several; and objects with state that none
            of them names, such as a scheduler that is stepped outside of ``run``.

    Returns:
        Whether this worker came back to a job that runs.

    Raises:
        RuntimeError: called after ``strategy.run``, or in replica context.
        PeerLostError: the job has ended.
        DeadlineExceededError: the others did not let this worker in.
        CollectiveMismatchError: this worker's objects are not those of the others.
        TypeError: one of ``uses`` is neither a function nor an object with attributes.

    Example:
        >>> epoch = Variable(0)
        >>> experimental.join(strategy)
        False
        >>> while int(epoch) < 2:
        ...     for batch in dataset:
        ...         losses = strategy.run(step, args=(batch,))
        ...     epoch.assign_add(1)
    """
    strategy.require_cross_replica_context("experimental.join", "it before strategy.run")
    return False if strategy._elastic_steps is None else strategy._elastic_steps.join(uses)
