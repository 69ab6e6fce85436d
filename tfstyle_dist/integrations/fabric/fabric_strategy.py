"""``TfdFabricStrategy``: Fabric's data parallel strategy, whose sums are those of a strategy of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.comm.options import CommunicationOptions
from tfstyle_dist.comm.rendezvous.bootstrap import default_process_group
from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.cross_device_ops import CrossDeviceOps
from tfstyle_dist.integrations.data_parallel import sum_gradients_by, sum_of_processes
from tfstyle_dist.integrations.fabric import checks
from tfstyle_dist.integrations.fabric.environment import TFConfigEnvironment
from tfstyle_dist.integrations.fabric.upstream import STRATEGY_REGISTRY, DDPStrategy
from tfstyle_dist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy
from tfstyle_dist.variables.wrapped_twice import leave_group_to_python

if TYPE_CHECKING:
    from tfstyle_dist.strategies import Strategy

NAME = "tfd_mirrored"


class TfdFabricStrategy(DDPStrategy):  # type: ignore[misc]
    """The ``strategy`` of a ``lightning.fabric.Fabric`` whose processes train under a strategy.

    Models become ``DistributedDataParallel``, as under ``strategy="ddp"``; their gradients, and the sums and means of
    ``fabric.all_reduce``, are added by the strategy in a fixed order. ``Fabric(strategy="tfd_mirrored")`` makes one
    without arguments, once this module is imported. See ``docs/fabric.md``.

    Args:
        strategy: a ``MirroredStrategy``, ``MultiWorkerMirroredStrategy`` or ``OneDeviceStrategy`` with one replica in
            each process, of processes that torchrun or ``TF_CONFIG`` has started. Default: one is made when Fabric
            launches, with a replica for each of its processes.
        cross_device_ops: of the strategy that is made.
        communication_options: likewise.
        **kwargs: those of ``lightning.fabric.strategies.DDPStrategy``; ``timeout`` is also the limit of the waits of
            the strategy that is made, unless ``TFSTYLE_TIMEOUT_SECONDS`` or ``communication_options`` says another.

    Raises:
        TypeError: a strategy of another kind.
        ValueError: the strategy is elastic, or a replica of it is not one process; or ``strategy`` is given together
            with arguments for the one to make, or with ``start_method="spawn"``.

    Example:
        >>> fabric = Fabric(accelerator="cpu", devices=2, strategy=TfdFabricStrategy())
        >>> fabric.launch()
        >>> fabric.strategy.strategy.num_replicas_in_sync
        2

    Not in TensorFlow.
    """

    cluster_environment: Any

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        **kwargs: Any,
    ) -> None:
        checks.check_strategy(strategy)
        options = {"cross_device_ops": cross_device_ops, "communication_options": communication_options}
        self._options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if strategy is not None and self._options:
            raise ValueError(
                f"TfdFabricStrategy was given a strategy and {', '.join(self._options)}: the strategy has its own. "
                "Pass them where it is made, or leave the strategy out."
            )
        self._strategy, self._made = strategy, False
        super().__init__(**kwargs)
        if self.cluster_environment is None and TFConfigEnvironment.detect():
            self.cluster_environment = TFConfigEnvironment(self)
        method = kwargs.get("start_method", "popen")
        if method != "popen" and (strategy is not None or isinstance(self.cluster_environment, TFConfigEnvironment)):
            raise ValueError(
                f"TfdFabricStrategy(start_method={method!r}) starts processes, but "
                f"{'a strategy was given' if strategy is not None else 'TF_CONFIG is set'}, whose processes are there "
                "already. Leave one of them out."
            )

    # ---- the strategy -----------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The strategy that adds.

        Raises:
            UnavailableError: Fabric has not launched.
        """
        if self._strategy is None:
            raise UnavailableError("TfdFabricStrategy makes its strategy in fabric.launch(): call it before.")
        return self._strategy

    def setup_environment(self) -> None:
        """Joins the processes; called by ``fabric.launch()``.

        Raises:
            ValueError: the strategy given has other workers, or another device, than Fabric.
        """
        if self._strategy is None and isinstance(self.cluster_environment, TFConfigEnvironment):
            self._make()  # they meet as TF_CONFIG says, and Fabric takes the group
        if self._strategy is not None and not self._made:
            checks.check_match(self._strategy, self)
        super().setup_environment()
        if self._strategy is None or (self._made and self._strategy.closed):
            self._make()

    def _make(self) -> None:
        device = self.root_device
        several_hosts = self.num_nodes > 1 or isinstance(self.cluster_environment, TFConfigEnvironment)
        kind = MultiWorkerMirroredStrategy if several_hosts else MirroredStrategy
        self._strategy = kind(devices=[f"{device.type}:{device.index or 0}"], **self._options)
        self._made = True
        checks.check_match(self._strategy, self)

    def teardown(self) -> None:
        """Closes the strategy, if it was made here."""
        if self._made and self._strategy is not None:
            self._strategy.close()
        super().teardown()

    # ---- what it adds -----------------------------------------------------------------------------------------------

    def setup_module(self, module: torch.nn.Module) -> Any:
        """The model as ``DistributedDataParallel``, whose gradients the strategy adds.

        Args:
            module: the model.

        Raises:
            ValueError: it was made in the scope of a strategy.
        """
        checks.check_model(module)
        model = super().setup_module(module)
        sum_gradients_by(self.strategy, model)
        leave_group_to_python(model)  # in a job of one process nobody else does
        return model

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """See Fabric; sums and means over all processes in the order of the strategy's aggregation method.

        Args:
            tensor: changed in place; anything else is returned as it is.
            group: processes; default: all.
            reduce_op: ``"mean"``, ``"sum"`` or another operation of ``torch.distributed``.
        """
        name = str(getattr(reduce_op, "name", reduce_op)).lower()
        whole = group is None or group is default_process_group()
        dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.dtype is not torch.bool
        if not (whole and dense and name in ("sum", "mean", "avg")) or self._strategy is None:
            return super().all_reduce(tensor, group, reduce_op)
        tensor.detach().copy_(sum_of_processes(self._strategy, tensor, "Fabric.all_reduce", name != "sum"))
        return tensor

    # ---- what Fabric asks -------------------------------------------------------------------------------------------

    @property
    def precision(self) -> Any:
        """Fabric's plugin for the type of numbers."""
        return super().precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        checks.check_precision(precision)
        DDPStrategy.precision.fset(self, precision)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Enters the name ``tfd_mirrored``.

        Args:
            strategy_registry: Fabric's.
        """
        if NAME not in strategy_registry:
            strategy_registry.register(NAME, cls, description="Sums in a fixed order, by tfstyle_dist")


TfdFabricStrategy.register_strategies(STRATEGY_REGISTRY)
