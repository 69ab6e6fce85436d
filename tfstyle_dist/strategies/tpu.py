"""``tf.distribute.TPUStrategy``: XLA devices, one replica on each, or one program divided over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.comm.divided_layers import divided_axes, planned_layers
from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.comm.options import CommunicationOptions, options_or_default
from tfstyle_dist.comm.rendezvous.bootstrap import effective_timeout
from tfstyle_dist.comm.single_group import SingleGroup
from tfstyle_dist.comm.xla.xla_adapter import XlaAdapter
from tfstyle_dist.comm.xla.xla_group import XlaGroup
from tfstyle_dist.core import nest
from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.gradients.exchanges.xla import GraphReducer
from tfstyle_dist.gradients.reducer import GradientReducer
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.extended import StrategyExtended
from tfstyle_dist.strategies.mirrored import MirroredVariables
from tfstyle_dist.strategies.tpu_devices import DeviceAssignmentLike, logical_shape
from tfstyle_dist.values import has_unequal_shares

_WARM_UP_STEPS = 3


class TPUStrategy(MirroredVariables):
    """Synchronous training on XLA devices (``tf.distribute.TPUStrategy``): TPUs, or virtual devices of the CPU.

    With ``torch_xla.launch(main)`` each device is a replica, which ``main`` runs once. In a program that was started by
    hand, or with ``use_spmd=True``, there is one replica over all devices: ``run`` is called with the global batch, and
    the compiler divides it among the devices. Numbers are those of one device.

    ``run`` traces the step, then compiles and starts it: a program needs no ``torch_xla.sync()``. A step with other
    shapes is compiled anew, which takes long and is said in the log; use ``drop_remainder=True`` for datasets. When a
    dataset gives the replicas shares of different sizes, their programs differ, and what they do together is compiled
    apart.

    Build models on the device: ``with strategy.scope(), torch.device(strategy.device): ...``.

    Args:
        tpu_cluster_resolver: kept as ``cluster_resolver``; torch_xla finds the devices itself.
        experimental_device_assignment: with ``use_spmd``, how many devices make up a logical replica
            (``num_cores_per_replica``); the others divide the batch. Default: every device divides the batch.
        experimental_spmd_xla_partitioning: TensorFlow's name of ``use_spmd``.
        use_spmd: one program over all devices; default: if this program was not started by ``torch_xla.launch``.
        communication_options: its timeout is when a wait is reported in the log.

    Raises:
        ImportError: torch_xla is absent, or is made for another torch.
        ValueError: torchrun started the program, or the assignment does not fit the devices.

    Example:
        >>> strategy = TPUStrategy()  # PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python train.py: four virtual devices
        >>> strategy.run(lambda x: x + 1, args=(torch.ones(()),))
        tensor(2., device='xla:0')
    """

    def __init__(
        self,
        tpu_cluster_resolver: Any = None,
        experimental_device_assignment: DeviceAssignmentLike | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        use_spmd: bool | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        options = options_or_default(communication_options)
        self.adapter = XlaAdapter(True if experimental_spmd_xla_partitioning else use_spmd)
        self._resolver = tpu_cluster_resolver
        self._logical = logical_shape(self.adapter, experimental_device_assignment)
        timeout = effective_timeout(options)
        group: WorkerGroup = SingleGroup() if self.adapter.spmd else XlaGroup(self.adapter, timeout)
        device = self.adapter.device
        worker = Worker((ReplicaDevice("xla", device.index or 0),), group, timeout)
        super().__init__(StrategyExtended(worker), communication_options=options)
        self._mesh = self.adapter.mesh(self._logical, ("data", "model")) if self.adapter.spmd else None
        self._steps = 0
        self._compiled = self.adapter.num_compilations()

    def make_reducer(self) -> GradientReducer:
        """Gradients are part of the step's graph."""
        return GraphReducer(self.worker, self.parameter_store)

    # ---- facts ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this replica's tensors live."""
        return self.adapter.device

    @property
    def use_spmd(self) -> bool:
        """Whether one program runs over all devices."""
        return self.adapter.spmd

    @property
    def num_devices(self) -> int:
        """XLA devices of all processes."""
        return self.adapter.num_devices

    @property
    def num_compilations(self) -> int:
        """How many graphs this process has compiled so far; a number that keeps growing means changing shapes."""
        return self.adapter.num_compilations()

    # ---- logical devices --------------------------------------------------------------------------------------

    @property
    def num_logical_devices_per_replica(self) -> int:
        """XLA devices that hold one replica's model."""
        return self._logical[1] if self.use_spmd else 1

    def experimental_split_to_logical_devices(self, tensor: torch.Tensor, partition_dimensions: Sequence[int]) -> Any:
        """See ``LogicalDevices``; several dimensions may be cut, and the tensor itself comes back, laid out so."""
        self.check_partition(tensor, partition_dimensions)
        return self._laid_out(tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: torch.Tensor) -> Any:
        """See ``LogicalDevices``; the tensor itself comes back."""
        return self._laid_out(tensor, [1] * tensor.dim())

    def experimental_assign_to_logical_device(self, tensor: torch.Tensor, logical_device_id: int) -> Any:
        """See ``LogicalDevices``; there is one value, and the compiler decides where it is computed."""
        self.check_logical_device(logical_device_id)
        return self._laid_out(tensor, [1] * tensor.dim())

    def _laid_out(self, tensor: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
        if not self.use_spmd:
            return tensor
        if tensor.device != self.device:
            raise ValueError(
                f"Only a tensor on {self.device} can be laid out, but this one is on {tensor.device}; write "
                f"tensor.to({str(self.device)!r}) first."
            )
        names = tuple(f"dimension{axis}" for axis in range(len(parts)))
        grid = self.adapter.mesh((self.num_devices // math.prod(parts), *parts), ("others", *names))
        partition = [name if count > 1 else None for name, count in zip(names, parts, strict=True)]
        if tensor.requires_grad and not tensor.is_leaf:
            return self.adapter.constrain(tensor, grid, partition)
        self.adapter.mark_sharding(tensor, grid, partition)
        return tensor

    def experimental_partition(self, module: torch.nn.Module, plan: Mapping[str, str]) -> torch.nn.Module:
        """See ``LogicalDevices``: the parameters stay the same objects, and the compiler does the rest."""
        count = self.num_logical_devices_per_replica
        for pattern, layer in planned_layers(module, plan):
            for name, axis in divided_axes(pattern, layer, plan[pattern]).items():
                parameter = getattr(layer, name)
                if parameter is not None and count > 1:
                    self._laid_out(parameter, [count if place == axis else 1 for place in range(parameter.dim())])
        return module

    # ---- running ----------------------------------------------------------------------------------------------

    def _run(self, fn: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """What ``fn`` did is one graph, which is compiled and started when ``fn`` returns."""
        group = self.worker.group
        self.parameter_store.ensure_equal()
        leaves = nest.leaves((arguments, keywords))
        if isinstance(group, XlaGroup):
            for leaf in leaves:
                self._hold_as_data(leaf)
            with group.step(same=not has_unequal_shares(leaves)):
                result = super()._run(fn, arguments, keywords)
        else:
            for leaf in leaves:
                self._divide_batch(leaf)
            result = super()._run(fn, arguments, keywords)
            self.adapter.sync()
        self._count_compilations()
        return result

    def _hold_as_data(self, leaf: Any) -> None:
        """torch_xla writes a scalar tensor of value 0 or 1 into the program, which would differ between replicas."""
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.device == self.device and not leaf.requires_grad:
            with torch.no_grad():
                leaf.copy_(leaf + 0)

    def _divide_batch(self, leaf: Any) -> None:
        """Lays a tensor out over the data axis, if its first dimension can be divided; this changes no value."""
        axis = self._logical[0]
        if isinstance(leaf, torch.Tensor) and leaf.device == self.device and axis > 1:
            if leaf.requires_grad or leaf.dim() == 0 or leaf.shape[0] % axis or leaf.shape[0] == 0:
                return
            self.adapter.mark_sharding(leaf, self._mesh, ("data", *[None] * (leaf.dim() - 1)))

    def _count_compilations(self) -> None:
        self._steps += 1
        compiled = self.adapter.num_compilations()
        if compiled > self._compiled and self._steps > _WARM_UP_STEPS:
            get_logger().warning(
                "call %d of TPUStrategy.run compiled %d new graph(s) (%d in all): its shapes or its path through the "
                "code are new. Keep shapes fixed, e.g. with drop_remainder=True.",
                self._steps,
                compiled - self._compiled,
                compiled,
            )
        self._compiled = compiled

    def __repr__(self) -> str:
        if self.use_spmd:
            data, model = self._logical
            return f"<TPUStrategy, one program over {self.num_devices} XLA devices ({data} x {model})>"
        return f"<TPUStrategy replica {self.adapter.rank} of {self.adapter.world_size} on {self.device}>"


class ExperimentalTPUStrategy(TPUStrategy):
    """The older name of ``TPUStrategy`` (``tf.distribute.experimental.TPUStrategy``).

    Args:
        tpu_cluster_resolver: as in ``TPUStrategy``.
        device_assignment: its ``experimental_device_assignment``.
    """

    def __init__(self, tpu_cluster_resolver: Any = None, device_assignment: DeviceAssignmentLike | None = None) -> None:
        super().__init__(tpu_cluster_resolver, device_assignment)
