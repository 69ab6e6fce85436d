"""``tf.distribute.MirroredStrategy``: equal copies on all replicas, updated alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tfstyle_dist.cluster_resolver import TFConfigClusterResolver
from tfstyle_dist.comm.options import CommunicationOptions, options_or_default
from tfstyle_dist.comm.rendezvous.adoption import AdoptedGroup, adopted_group
from tfstyle_dist.comm.rendezvous.bootstrap import effective_timeout, make_group
from tfstyle_dist.core import devices as device_names, launch_env
from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.cross_device_ops import CrossDeviceOps
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.extended import StrategyExtended
from tfstyle_dist.strategies.logical_devices import LogicalDevices, with_model_axis
from tfstyle_dist.variables import DistributedVariable, Variable
from tfstyle_dist.variables.creation import VariableSpec, build_variable, create_jointly

if TYPE_CHECKING:
    from tfstyle_dist.comm.rendezvous.adoption import ProcessGroup


class MirroredVariables(LogicalDevices):
    """What strategies with equal copies on all replicas have in common; use a subclass."""

    def create_variable(self, spec: VariableSpec) -> Variable:
        """A variable with a copy on every replica."""
        if spec.synchronization is VariableSynchronization.NONE:
            raise ValueError(
                f"VariableSynchronization.NONE is not supported by {type(self).__name__}: its variables have a copy on "
                "every replica. Use AUTO, ON_WRITE or ON_READ."
            )
        if spec.synchronization is VariableSynchronization.AUTO:
            spec.synchronization = VariableSynchronization.ON_WRITE
        return create_jointly(self, spec, self._build)

    def _build(self, spec: VariableSpec) -> Variable:
        tensor = spec.initial_tensor()
        if spec.aggregation is VariableAggregation.MEAN and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"Aggregation MEAN needs a floating point variable, got dtype {tensor.dtype} for "
                f"{spec.name or 'Variable'!r}. Use SUM or ONLY_FIRST_REPLICA, or a float dtype."
            )
        return build_variable(DistributedVariable, spec, self.parameter_store, tensor, spec.synchronization)


def check_cross_device_ops(cross_device_ops: CrossDeviceOps | None) -> None:
    """Raises TypeError for anything but a ``CrossDeviceOps`` or ``None``."""
    if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
        raise TypeError(
            f"cross_device_ops must be an instance of CrossDeviceOps, e.g. ReductionToOneDevice(), got "
            f"{cross_device_ops!r}."
        )


class MirroredStrategy(MirroredVariables):
    """Synchronous training on several replicas of one host (``tf.distribute.MirroredStrategy``).

    Started by torchrun, every process is one replica (its GPU ``LOCAL_RANK``, else the CPU). Started by hand, one
    process runs one replica for each device; they take turns (``docs/replicas.md``).

    Args:
        devices: the local replicas' devices, e.g. ``["cpu:0", "cpu:1"]`` (two logical replicas on the CPU),
            ``["/gpu:0", "/gpu:1"]``, ``["cuda:0#0", "cuda:0#1"]`` (two on one GPU); default: all GPUs, else the CPU.
        cross_device_ops: how local values are summed; default: ADD_N on the first replica's device.
        communication_options: bucket size, timeout and implementation of the communication.
        run_replicas: of earlier versions, without effect: local replicas take turns.
        logical_devices_per_replica: how many consecutive processes hold one replica, each a part of the model; see
            ``experimental_partition``.
        process_group: a group of ``torch.distributed`` whose members are the workers; default: the default group,
            where the program or an engine has initialised it. See ``docs/scaling_out.md``.

    Raises:
        ValueError: a device twice, CPU and GPU mixed, a device that is absent, disagreeing numbers of workers, or a
            ``process_group`` to which this process does not belong.
        TypeError: ``cross_device_ops`` is no ``CrossDeviceOps``, or ``process_group`` no process group.
        DeadlineExceededError: a worker process did not start in time.

    Example:
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.run(lambda: get_replica_context().replica_id_in_sync_group).values
        (0, 1)
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        run_replicas: str | None = None,
        logical_devices_per_replica: int = 1,
        process_group: ProcessGroup | None = None,
    ) -> None:
        check_cross_device_ops(cross_device_ops)
        check_run_replicas(run_replicas)
        options = options_or_default(communication_options)
        adopted = adopted_group(process_group)
        if adopted is None and launch_env.launch() is None:
            say_cluster_unused()
        places = device_names.parse_replica_devices(devices) if devices is not None else own_devices(adopted)
        group = make_group(places[0].torch_device, options, num_local_replicas=len(places), adopted=adopted)
        group = with_model_axis(group, logical_devices_per_replica, len(places))
        worker = Worker(places, group, effective_timeout(options, adopted))
        super().__init__(StrategyExtended(worker, cross_device_ops), communication_options=options)
        self.join_model_axis()


def say_cluster_unused() -> None:
    """Says once that a cluster that ``TF_CONFIG`` describes is not used."""
    try:
        resolver = TFConfigClusterResolver()
        cluster, task = resolver.cluster_spec().as_dict(), resolver.task_type
    except (TypeError, ValueError):  # it is for those who use it
        return
    training = sum(len(cluster.get(job, ())) for job in ("chief", "worker"))
    if training > 1 and "ps" not in cluster and task in ("chief", "worker"):
        warn_once(
            "a cluster that is not used",
            f"TF_CONFIG describes {training} workers, but MirroredStrategy trains in this process alone: each worker "
            "trains a model of its own, with all of the data. Write MultiWorkerMirroredStrategy(), or unset TF_CONFIG.",
        )


def check_run_replicas(run_replicas: str | None) -> None:
    """Says once that ``run_replicas`` has no effect any more."""
    if run_replicas is not None:
        warn_once(
            "run_replicas",
            f"run_replicas={run_replicas!r} has no effect any more: the replicas of one process take turns, in "
            "the same order in every run. Leave it out.",
        )


def own_devices(adopted: AdoptedGroup | None = None) -> tuple[ReplicaDevice, ...]:
    """The devices of this process: under a launcher the rank's own, else all that are found.

    A rank that sees one device alone takes it, as where Slurm shows each task its own; ranks that share one notice it
    when they meet.

    Args:
        adopted: the process group that is there already: with several members and no launcher, each takes its current
            device.
    """
    found = device_names.find_local_devices()
    if found[0].type == "cpu":
        return found
    launch = launch_env.launch()
    if launch is None and adopted is not None and adopted.size > 1:
        current = device_names.accelerator(found[0].type).current_device()
        own = tuple(device for device in found if device.index == current)[:1]
        if not own:
            raise ValueError(
                f"The current device of this process, {found[0].type}:{current}, is none of those that "
                f"set_visible_devices has left, {[str(device) for device in found]}. Call torch.cuda.set_device(...) "
                "for one of them before the strategy is made, or name the device with devices=."
            )
        return own
    if launch is None or launch.world_size == 1 or len(found) == 1:
        return found
    if launch.local_world_size > len(found):
        raise ValueError(
            f"LOCAL_WORLD_SIZE={launch.local_world_size}, but each process of this host sees {len(found)} devices of "
            f"kind {found[0].type!r} (without those that set_visible_devices left out). Start at most one process "
            "for each device, or hide them (for GPUs CUDA_VISIBLE_DEVICES=) to train on the CPU."
        )
    return (found[launch.local_rank],)
