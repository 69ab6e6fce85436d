"""``MultiWorkerMirroredStrategy(elastic=...)``: logical replicas held by the workers that live."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from tfstyle_dist.cluster_resolver import ClusterResolver, TorchrunClusterResolver, roles
from tfstyle_dist.comm.single_group import SingleGroup
from tfstyle_dist.core import devices as device_names, env, nest, network
from tfstyle_dist.elastic import Elastic
from tfstyle_dist.elastic.job import ElasticJob
from tfstyle_dist.elastic.membership import Membership
from tfstyle_dist.elastic.turns import ElasticRun, HeldContent
from tfstyle_dist.runtime.executor import ReplicaExecutor
from tfstyle_dist.runtime.turns import TurnRun
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.running import replica_function
from tfstyle_dist.values import note_result, select_arguments, select_replica, share_of_arguments


class ElasticGroup(SingleGroup):
    """What a worker of an elastic job has in the place of a group: it looks as if it held all replicas.

    What the workers do together goes through the job's steps; other collective calls are refused.
    """

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """Refuses.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{name}: saving and restoring with train.Checkpoint is not supported in an elastic job yet. Save on one "
            "worker, `if strategy.is_chief: torch.save(...)`, what every worker holds: model.state_dict(), "
            "optimizer.state_dict() and the dataset iterator's state_dict(); load it on all workers."
        )


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
        self._drawn = 0
        self.membership = Membership(rank, addresses, options, timeout, torch.initial_seed())
        try:
            self.membership.start(env.start_timeout(timeout))
        except BaseException:
            self.membership.close()
            raise

    def draw_seed(self) -> int:
        """The next seed of the job, the same on all workers."""
        self._drawn += 1
        name = f"{self.membership.seed} dataset {self._drawn}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1

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
        self.job = ElasticJob(worker.membership, strategy.parameter_store, strategy.gradient_reducer, options.replicas)
        strategy.parameter_store.make_equal = self.job.make_equal
        self._executor: tuple[tuple[int, ...], ReplicaExecutor] | None = None

    def run(self, function: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> list[Any]:
        """Calls the function for each replica of this worker, until the step is committed; all replicas' results."""
        store = self._strategy.parameter_store
        store.prepare(function, (*arguments, *keywords.values()))
        try:
            results = self.job.run(lambda: self._attempt(function, arguments, keywords), (arguments, keywords))
            self._note_shares(results, arguments, keywords)
            return results
        except BaseException:
            # The others cannot wait for a worker that will not finish the step.
            self._worker.membership.close()
            raise

    def _note_shares(self, results: list[Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> None:
        """Notes what is noted of results where they are computed, for those that came from other workers."""
        for replica in set(range(len(results))) - set(self.job.held):
            given = (*select_arguments(replica, arguments), *select_replica(replica, keywords).values())
            share = share_of_arguments(given)
            if share is not None and share.some_empty:
                for leaf in nest.leaves(results[replica]):
                    note_result(leaf, share)

    def _attempt(self, function: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> list[Any]:
        held = self.job.held
        functions = [self._of_replica(r, held, function, arguments, keywords) for r in held]
        with self._strategy.update_runner.same_steps(self._worker.num_replicas, held):
            return self._executor_of(held).run(functions)

    def _of_replica(
        self,
        replica: int,
        held: tuple[int, ...],
        function: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: dict[str, Any],
    ) -> Callable[[TurnRun], Any]:
        call = replica_function(self._strategy, replica, function, arguments, keywords)
        return lambda run: call(ElasticRun(run, held, self.job))

    def _executor_of(self, held: tuple[int, ...]) -> ReplicaExecutor:
        if self._executor is None or self._executor[0] != held:
            if self._executor is not None:
                self._executor[1].close()
            devices = [self._worker.devices[r] for r in held]
            executor = ReplicaExecutor(devices, self._worker.timeout)
            executor.content = HeldContent(self._strategy.parameter_store.contents, held)
            self._executor = held, executor
        return self._executor[1]

    def close(self) -> None:
        """Ends the threads."""
        if self._executor is not None:
            self._executor[1].close()


def _tasks(options: Elastic, resolver: ClusterResolver) -> tuple[int, list[tuple[str, int]]]:
    """This worker's number and the addresses of all."""
    if not isinstance(options, Elastic):
        raise TypeError(f"elastic must be an experimental.Elastic(replicas=...), got {options!r}.")
    if isinstance(resolver, TorchrunClusterResolver):
        raise ValueError(
            "MultiWorkerMirroredStrategy(elastic=) was started by torchrun, whose agent ends the survivors when one "
            "worker dies, and which gives the workers no addresses of their own. Start the workers with python -m "
            "tfstyle_dist.launch --elastic, or one by one with TF_CONFIG."
        )
    if torch.accelerator.is_available():
        raise NotImplementedError(
            "MultiWorkerMirroredStrategy(elastic=) computes on the CPU only, and this process sees accelerators. Hide "
            "them (CUDA_VISIBLE_DEVICES=), or leave elastic= out."
        )
    tasks, rank = roles.training_tasks(resolver)
    if options.replicas < 2:
        raise ValueError("Elastic(replicas=1): with one replica there is nothing that another worker could take over.")
    if len(tasks) > options.replicas:
        raise ValueError(
            f"The cluster has {len(tasks)} workers and Elastic(replicas={options.replicas}): every worker holds at "
            "least one replica. Give more replicas, or start fewer workers."
        )
    if len(tasks) == 1:
        return 0, [("127.0.0.1", network.free_ports(1)[0])]
    return rank, [network.parse_address(task.address) for task in tasks]
