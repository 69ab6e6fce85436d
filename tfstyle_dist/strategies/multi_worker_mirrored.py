"""``tf.distribute.MultiWorkerMirroredStrategy``: equal copies on the replicas of several worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    roles,
)
from tfstyle_dist.comm.options import CommunicationImplementation, CommunicationOptions, options_or_default
from tfstyle_dist.comm.rendezvous.adoption import AdoptedGroup, adopted_group
from tfstyle_dist.comm.rendezvous.bootstrap import effective_timeout, make_group
from tfstyle_dist.comm.rendezvous.members import Members
from tfstyle_dist.core import devices as device_names, launch_env, network
from tfstyle_dist.cross_device_ops import CrossDeviceOps
from tfstyle_dist.monitoring import Monitor
from tfstyle_dist.monitoring.report import Report
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.extended import StrategyExtended
from tfstyle_dist.strategies.logical_devices import with_model_axis
from tfstyle_dist.strategies.mirrored import MirroredVariables, check_cross_device_ops, check_run_replicas, own_devices

if TYPE_CHECKING:
    from tfstyle_dist.comm.rendezvous.adoption import ProcessGroup
    from tfstyle_dist.elastic import Elastic

_SLURM_PORTS = range(20000, 40000)


class MultiWorkerMirroredStrategy(MirroredVariables):
    """Synchronous training on the replicas of several workers (``tf.distribute.MultiWorkerMirroredStrategy``).

    The workers are found, in this order, from ``cluster_resolver``, from ``TF_CONFIG``, from torchrun's environment or
    from that of a SLURM step; without any of them this process is the only worker. The tasks ``chief`` and ``worker``
    train together, the chief (else worker 0) first; its address is where they meet. A task ``evaluator`` is alone with
    itself. ONLY_FIRST_REPLICA means each worker's own first replica, as in TensorFlow.

    Args:
        cluster_resolver: who the workers are.
        communication_options: bucket size, timeout and implementation of the communication.
        devices: this worker's replicas, as in ``MirroredStrategy``; default: under torchrun the GPU ``LOCAL_RANK``,
            else all GPUs, else the CPU. All workers must have as many.
        cross_device_ops: how local values are summed; default: ADD_N on the first replica's device.
        run_replicas: as in ``MirroredStrategy``.
        logical_devices_per_replica: likewise.
        elastic: lets the job survive the death of workers; see ``experimental.Elastic`` and ``docs/elastic.md``.
        process_group: a group of ``torch.distributed`` whose members are the workers, instead of a
            ``cluster_resolver``; default: the default group, where the program or an engine has initialised it. See
            ``docs/scaling_out.md``.

    Raises:
        json.JSONDecodeError: ``TF_CONFIG`` is not JSON.
        ValueError: the cluster is wrong (an unknown job, a task that does not exist, an address twice), contradicts
            torchrun's environment or the process group, or the workers' replicas differ; or NCCL was asked for and
            cannot run; or this process does not belong to ``process_group``.
        TypeError: ``cluster_resolver`` is no ``ClusterResolver``, or ``process_group`` no process group.
        DeadlineExceededError: workers did not start in time (5 minutes, ``TFSTYLE_START_TIMEOUT_SECONDS``); the
            message lists them with their addresses.
        UnavailableError: the port where the workers meet is in use.

    Example:
        >>> # TF_CONFIG='{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
        >>> strategy = MultiWorkerMirroredStrategy()
        >>> strategy.num_replicas_in_sync
        2
    """

    first_replica_is_global = False

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[str | torch.device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        run_replicas: str | None = None,
        logical_devices_per_replica: int = 1,
        elastic: Elastic | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        check_cross_device_ops(cross_device_ops)
        check_run_replicas(run_replicas)
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise TypeError(
                f"cluster_resolver must be a ClusterResolver, got {cluster_resolver!r}; write e.g. "
                "cluster_resolver.TFConfigClusterResolver()."
            )
        options = options_or_default(communication_options)
        if process_group is not None and (cluster_resolver is not None or elastic is not None):
            other = "cluster_resolver" if cluster_resolver is not None else "elastic"
            raise ValueError(
                f"MultiWorkerMirroredStrategy was given process_group and {other}: leave one out. The workers are "
                "the members of the process group, or those that find each other by the cluster."
            )
        if elastic is not None:
            self._resolver = cluster_resolver or resolver_from_environment()
            self._begin_elastic(elastic, options, cross_device_ops, devices, logical_devices_per_replica)
            return
        adopted = adopted_group(process_group)
        self._resolver, members = _workers(cluster_resolver, adopted)
        places = device_names.parse_replica_devices(devices) if devices is not None else own_devices(adopted)
        group = make_group(places[0].torch_device, options, members, len(places), adopted)
        group = with_model_axis(group, logical_devices_per_replica, len(places))
        worker = Worker(places, group, effective_timeout(options, adopted))
        super().__init__(StrategyExtended(worker, cross_device_ops), communication_options=options)
        self.join_model_axis()

    def _begin_elastic(
        self,
        elastic: Elastic,
        options: CommunicationOptions,
        cross_device_ops: CrossDeviceOps | None,
        devices: Sequence[str | torch.device] | None,
        logical_devices_per_replica: int,
    ) -> None:
        from tfstyle_dist.strategies.elastic import ElasticSteps, ElasticWorker

        if devices is not None or logical_devices_per_replica != 1:
            raise ValueError(
                "MultiWorkerMirroredStrategy(elastic=) takes neither devices nor logical_devices_per_replica: the "
                "number of replicas is Elastic(replicas=), and each is computed on the CPU of the worker that holds it."
            )
        worker = ElasticWorker(elastic, self._resolver, effective_timeout(options))
        try:
            super().__init__(StrategyExtended(worker, cross_device_ops), communication_options=options)
            self.monitor = Monitor(worker, False)
            self._elastic_steps = ElasticSteps(self, worker, elastic)
        except BaseException:
            worker.close()
            raise

    def should_stop(self, flag: bool = False) -> bool:
        """See ``Strategy.should_stop``."""
        if self._elastic_steps is None:
            return super().should_stop(flag)
        self.require_cross_replica_context("Strategy.should_stop", "all_reduce of a flag")
        return self._elastic_steps.job.agreements.any_of(bool(flag))

    def report(self, function: str | None = None, *, quiet: bool = False) -> Report:
        """See ``Strategy.report``; of an elastic job what became of its steps, without communication."""
        if self._elastic_steps is None:
            return super().report(function, quiet=quiet)
        report = Report(elastic=self._elastic_steps.counts())
        if not quiet:
            self.print(report)
        return report

    @property
    def is_chief(self) -> bool:
        """See ``Strategy.is_chief``; in an elastic job the live worker with the lowest number."""
        return super().is_chief if self._elastic_steps is None else self._elastic_steps.job.is_lowest

    def close(self) -> None:
        """See ``Strategy.close``; an elastic job goes on without this worker.

        Raises:
            InvalidArgumentError: this worker has come back to an elastic job, and its program ends without a step.
        """
        steps = None if self.closed else self._elastic_steps
        if steps is not None:
            steps.close()
        super().close()
        if steps is not None:
            steps.check_took_part()


class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy):
    """The older signature (``tf.distribute.experimental.MultiWorkerMirroredStrategy``).

    Args:
        communication: the implementation alone.
        cluster_resolver: as in ``MultiWorkerMirroredStrategy``.
        **options: the keyword arguments of ``MultiWorkerMirroredStrategy``.

    Example:
        >>> strategy = experimental.MultiWorkerMirroredStrategy(experimental.CollectiveCommunication.RING)
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
        **options: Any,
    ) -> None:
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication), **options)


def resolver_from_environment() -> ClusterResolver:
    """The resolver of what is in the environment: TF_CONFIG, torchrun or a SLURM step, else an empty cluster.

    Raises:
        ValueError: TF_CONFIG and torchrun's variables contradict each other.
    """
    launch, tf_config = launch_env.launch(), TFConfigClusterResolver()
    if launch_env.tf_config() is not None and tf_config.cluster_spec():
        tasks, rank = roles.training_tasks(tf_config)
        if launch is not None and (launch.rank, launch.world_size) != (rank, len(tasks)):
            raise ValueError(
                f"TF_CONFIG says that this process is worker {rank} of {len(tasks)}, but RANK={launch.rank} and "
                f"WORLD_SIZE={launch.world_size}. Unset the one that is not meant, or pass cluster_resolver="
                "TorchrunClusterResolver() or TFConfigClusterResolver()."
            )
        return tf_config
    if launch is not None:
        return TorchrunClusterResolver()
    if launch_env.slurm_tasks() > 1 and launch_env.slurm("PROCID"):
        # Jobs of several users may share a node: their numbers keep the ports apart.
        first = _SLURM_PORTS[launch_env.slurm_job_id() * 16 % len(_SLURM_PORTS)]
        return SlurmClusterResolver(port_base=first)
    return tf_config


def _workers(resolver: ClusterResolver | None, adopted: AdoptedGroup | None) -> tuple[ClusterResolver, Members | None]:
    """Who the workers are, for the user and for the group: what was given, else the environment, else a group.

    Of the members of a process group only the numbers are known; their addresses are ``"rank-<n>"``.
    """
    if resolver is None and not (adopted and adopted.chosen):
        resolver = resolver_from_environment()
    if adopted is None or (resolver is not None and resolver.cluster_spec()):
        assert resolver is not None
        return resolver, members_of(resolver)
    cluster = ClusterSpec({"worker": [f"rank-{rank}" for rank in adopted.ranks]})
    return SimpleClusterResolver(cluster, task_type="worker", task_id=adopted.rank), None


def members_of(resolver: ClusterResolver) -> Members | None:
    """The workers that train together, from a resolver; ``None`` if the launcher's environment says it."""
    if isinstance(resolver, TorchrunClusterResolver):
        return None
    tasks, rank = roles.training_tasks(resolver)
    if len(tasks) == 1:
        return Members(0, 1, (str(tasks[0]),), None)
    signature = ", ".join(str(task) for task in tasks)
    addresses = [network.parse_address(task.address) for task in tasks]
    return Members(rank, len(tasks), tuple(str(task) for task in tasks), addresses[0], signature)
