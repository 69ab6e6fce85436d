"""``tf.distribute.experimental.CentralStorageStrategy``: one copy of every variable, many compute replicas.

What is refused, and where it is decided (under ``tfstyle_dist/``):

* several hosts, GPUs or several replicas in a process under torchrun: ``_compute_devices`` and ``_parameter_device``
  below; that the ranks' memory is one host's: ``shm/segment.py``;
* an ``assign`` in a replica to a variable without an aggregation: ``variables/assigning.py``;
* ``skip_gradients_aggregation`` with several processes, or with different gradients: ``train/local_updates.py``.

In one process, where the first replica makes the update for all:

* an optimizer that steps another one, fails without parameters, waits for the other replicas in its step, or changes
  parameters that are not in its groups: ``gradients/leading_update.py``;
* writes of several replicas to one parameter: ``variables/central/shared_writes.py``; to the optimizer's groups:
  ``variables/central/group_settings.py``; to its state outside of ``step()``: ``variables/central/state_writes.py``;
* parameters that a step makes: ``gradients/counterparts.py``;
* gradients that are parts of one tensor, where the compute devices are others: ``variables/central/home_row.py``.

Under torchrun, where each rank updates a part:

* a gradient that comes again after its bucket was sent: ``gradients/exchanges/central.py``;
* what only some ranks do (writes, gradients): ``gradients/shared_update.py``; other parameters than the others':
  ``gradients/update_shards.py``.

What every strategy refuses (``LBFGS``, a step inside of ``backward()``): ``gradients/optimizer_step.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.comm.options import CommunicationOptions
from tfstyle_dist.comm.rendezvous.adoption import adopted_group
from tfstyle_dist.comm.rendezvous.bootstrap import effective_timeout, make_group
from tfstyle_dist.core import devices as device_names, launch_env
from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.gradients.exchanges.central import CHUNK_BYTES, SharedReducer
from tfstyle_dist.gradients.leading_update import LeadingUpdateRunner
from tfstyle_dist.gradients.optimizer_step import UpdateRunner
from tfstyle_dist.gradients.reducer import GradientReducer
from tfstyle_dist.gradients.shared_update import SharedUpdateRunner
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.extended import StrategyExtended
from tfstyle_dist.variables import DistributedVariable, Variable
from tfstyle_dist.variables.central.shared_home import SharedHome
from tfstyle_dist.variables.creation import VariableSpec, build_single, create_jointly


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

    _shared: SharedHome

    def __init__(
        self,
        compute_devices: Sequence[str | torch.device] | None = None,
        parameter_device: str | torch.device | None = None,
    ) -> None:
        launch = launch_env.launch()
        places = _compute_devices(compute_devices, launch)
        self._home = _parameter_device(places, parameter_device, launch)
        adopted = adopted_group()
        group = make_group(self._home.torch_device, CommunicationOptions(), adopted=adopted)
        worker = Worker(places, group, effective_timeout(CommunicationOptions(), adopted))
        super().__init__(StrategyExtended(worker), parameter_device=self._home)
        if group.size > 1:
            self.parameter_store.shared_home = self._shared

    def make_reducer(self) -> GradientReducer:
        """Gradients of several processes are summed in shared memory, and their mean is kept once."""
        if self.worker.group.size == 1:
            return super().make_reducer()
        options, method = self.communication_options, self.cross_device_ops.aggregation_method
        return SharedReducer(self.worker, self.parameter_store, options.bytes_per_pack or CHUNK_BYTES, method)

    def make_update_runner(self) -> UpdateRunner:
        """Of several processes each updates its part."""
        if self.worker.group.size == 1:
            return LeadingUpdateRunner(self)
        self._shared = SharedHome(self.worker.group)
        return SharedUpdateRunner(self, self._shared)

    def _run(self, fn: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        raised: Exception | None = None
        try:
            return super()._run(fn, arguments, keywords)
        except Exception as error:
            raised = error
            raise
        finally:
            if self.update_runner is not None:
                self.update_runner.restore(raised)
            raised = None  # its traceback names this frame

    def create_variable(self, spec: VariableSpec) -> Variable:
        """A variable with one copy on the parameter device."""
        if not self.parameter_store.adopts:
            return build_single(Variable, spec, self.parameter_store)
        return create_jointly(self, spec, self._build)

    def _build(self, spec: VariableSpec) -> Variable:
        return build_single(DistributedVariable, spec, self.parameter_store)


def _compute_devices(
    wanted: Sequence[str | torch.device] | None, launch: launch_env.Launch | None
) -> tuple[ReplicaDevice, ...]:
    """One device for each process of a launcher; else those given, or all that are found."""
    places = device_names.parse_replica_devices(wanted) if wanted is not None else device_names.find_local_devices()
    if launch is None or launch.world_size == 1:
        return places
    if launch.local_world_size != launch.world_size:
        raise ValueError(
            f"CentralStorageStrategy keeps one copy of the model in the memory of one host, but WORLD_SIZE="
            f"{launch.world_size} and LOCAL_WORLD_SIZE={launch.local_world_size} say that there are several hosts. "
            "Start all ranks on one host, or use MultiWorkerMirroredStrategy."
        )
    if places[0].type != "cpu":
        raise ValueError(
            "CentralStorageStrategy under torchrun computes on the CPU. For several GPUs start one process without "
            "torchrun; each GPU is then a replica."
        )
    if len(places) > 1:
        raise ValueError(
            f"Under torchrun every process is one replica, but compute_devices names {len(places)}: "
            f"{[str(p) for p in places]}. Leave compute_devices out, or start one process without torchrun."
        )
    return places


def _parameter_device(
    compute: Sequence[ReplicaDevice], wanted: str | torch.device | None, launch: launch_env.Launch | None
) -> ReplicaDevice:
    """TensorFlow's rule: a single compute device holds everything itself."""
    if wanted is None:
        several = len(compute) > 1 or (launch is not None and launch.world_size > 1)
        return ReplicaDevice("cpu", 0) if several else compute[0]
    home = device_names.parse(wanted)
    device_names.check_present(home)
    if launch is not None and launch.world_size > 1 and home.type != "cpu":
        raise ValueError(
            f"Under torchrun the parameters are in the host's memory, but parameter_device is {home}. Leave it out."
        )
    return home
