"""``tf.distribute.experimental.CentralStorageStrategy``: one copy of every variable, many compute replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tfstyle_dist.comm.single_group import SingleGroup
from tfstyle_dist.core import devices as device_names
from tfstyle_dist.core import env
from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.core.enums import VariableSynchronization
from tfstyle_dist.runtime.context import current_frame
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.extended import StrategyExtended
from tfstyle_dist.variables import DistributedVariable, Placement, Variable
from tfstyle_dist.variables.creation import VariableSpec, build_variable


class CentralStorageStrategy(Strategy):
    """Synchronous training on several replicas of one host with one copy of the model.

    Variables, parameters and the optimizer's state live once, on the parameter device. The replicas compute with them,
    their gradients are summed there, and one update is made.

    Args:
        compute_devices: the replicas' devices, e.g. ``["cpu:0", "cpu:1"]`` or ``["/gpu:0", "/gpu:1"]``; default: all
            GPUs, else the CPU.
        parameter_device: where the variables live; default: the compute device if there is only one, else the CPU.

    Raises:
        ValueError: a device twice, CPU and GPU mixed, or a device that is absent.

    Example:
        >>> strategy = CentralStorageStrategy(["cpu:0", "cpu:1"])
        >>> strategy.extended.parameter_devices
        ('cpu:0',)

    Source: ``tf.distribute.experimental.CentralStorageStrategy``.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | torch.device] | None = None,
        parameter_device: str | torch.device | None = None,
    ) -> None:
        if compute_devices is None:
            places = device_names.find_local_devices()
        else:
            places = device_names.parse_replica_devices(compute_devices)
        launch = env.launch()
        if launch is not None and launch.world_size > 1:
            raise ValueError(
                f"CentralStorageStrategy runs in one process, but WORLD_SIZE={launch.world_size}. Start the script "
                "without torchrun, or use MirroredStrategy."
            )
        home = _parameter_device(places, parameter_device)
        super().__init__(StrategyExtended(Worker(places, SingleGroup(), env.timeout())))
        self.parameter_store.placement = Placement.CENTRAL
        self.parameter_store.parameter_device = home

    def create_variable(self, spec: VariableSpec) -> Variable:
        """A variable with one copy on the parameter device."""
        if self.num_replicas_in_sync == 1:
            return build_variable(Variable, spec, self.parameter_store, spec.initial_tensor(), spec.synchronization)
        frame = current_frame()
        if frame is not None and frame.replica is not None and frame.strategy is self:
            build = lambda specs: [self._build(specs[0])] * len(specs)  # noqa: E731
            variable: Variable = frame.replica.meet("variable creation", spec, build)
            self.parameter_store.ensure_equal()
            return variable
        return self._build(spec)

    def _build(self, spec: VariableSpec) -> Variable:
        shown = spec.synchronization
        # There is one copy: it is never read by combining several, whatever was asked for.
        trainable, spec.synchronization = spec.is_trainable(), VariableSynchronization.ON_WRITE
        spec.trainable = trainable
        return build_variable(DistributedVariable, spec, self.parameter_store, spec.initial_tensor(), shown)


def _parameter_device(compute: Sequence[ReplicaDevice], wanted: str | torch.device | None) -> ReplicaDevice:
    """TensorFlow's rule: a single compute device holds everything itself."""
    if wanted is None:
        return compute[0] if len(compute) == 1 else ReplicaDevice("cpu", 0)
    home = device_names.parse(wanted)
    device_names.check_present(home)
    return home
