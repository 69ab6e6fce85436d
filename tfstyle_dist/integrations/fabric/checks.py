"""What cannot go together with Fabric is refused, with what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfstyle_dist.integrations.data_parallel import is_elastic
from tfstyle_dist.integrations.fabric.upstream import ELSEWHERE
from tfstyle_dist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy
from tfstyle_dist.variables import find_record

if TYPE_CHECKING:
    import torch

    from tfstyle_dist.integrations.fabric.fabric_strategy import TfdFabricStrategy
    from tfstyle_dist.strategies import Strategy

_KINDS = (MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy)
_LOOP = "Write the loop with strategy.run instead (docs/migrating.md)"


def check_strategy(strategy: Any) -> None:
    """Refuses a strategy under which Fabric's loop cannot train; ``None`` is made later.

    Raises:
        TypeError: it is of another kind.
        ValueError: it is elastic, or a replica is not one process.
    """
    if strategy is None:
        return
    if not isinstance(strategy, _KINDS):
        names = ", ".join(kind.__name__ for kind in _KINDS)
        raise TypeError(
            f"TfdFabricStrategy takes one of {names}, got {strategy!r}: Fabric gives each process a copy of the model, "
            f"which its own optimizer updates. {_LOOP}; central storage and parameter servers also train under "
            "tfstyle_dist.integrations.accelerate."
        )
    if is_elastic(strategy):
        raise ValueError(
            f"TfdFabricStrategy cannot take {strategy!r}: the workers of an elastic job change, Fabric's processes do "
            f"not. {_LOOP}, or leave elastic= out."
        )
    if not isinstance(strategy, OneDeviceStrategy) and strategy.num_logical_devices_per_replica > 1:
        raise ValueError(
            f"TfdFabricStrategy cannot take {strategy!r}: a replica on several processes needs a step that runs on all "
            f"of them. {_LOOP}, or use lightning.fabric.strategies.ModelParallelStrategy."
        )
    if strategy.worker.num_local_replicas > 1:
        count = strategy.worker.num_local_replicas * strategy.worker.group.size
        raise ValueError(
            f"TfdFabricStrategy cannot take {strategy!r}: it has {strategy.worker.num_local_replicas} replicas in this "
            f"process, and Fabric has one. Write Fabric(devices={count}, strategy=TfdFabricStrategy()), which starts "
            f"{count} processes, or one loop for all with strategy.run (docs/migrating.md)."
        )


def check_match(strategy: Strategy, fabric: TfdFabricStrategy) -> None:
    """Refuses a strategy of other workers, or on another device, than Fabric.

    Raises:
        ValueError: they differ.
    """
    group = strategy.worker.group
    here, there = (group.rank, group.size), (fabric.global_rank, fabric.world_size)
    if here != there:
        raise ValueError(
            f"{strategy!r} is worker {here[0]} of {here[1]}, but Fabric's process is {there[0]} of {there[1]}. A "
            "strategy that is made before Fabric starts the processes cannot know them: write TfdFabricStrategy() "
            "without it (cross_device_ops= and communication_options= choose how it adds), or start the processes by "
            f"torchrun or TF_CONFIG, and give Fabric as many: devices times num_nodes = {here[1]}."
        )
    first, root = strategy.worker.torch_device(0), fabric.root_device
    # All numbers of CPUs are torch's one CPU.
    if first.type != root.type or (first.type != "cpu" and (first.index or 0) != (root.index or 0)):
        raise ValueError(
            f"The replica of {strategy!r} is on {first}, but Fabric is on {root}. Make the strategy with "
            f"devices=['{root}'], or write Fabric(accelerator='{first.type}')."
        )


def check_precision(precision: Any) -> None:
    """Refuses precision plugins of strategies that divide the work in another way.

    Raises:
        ValueError: it is one.
    """
    if isinstance(precision, ELSEWHERE):
        raise ValueError(
            f"{type(precision).__name__} belongs to another strategy of Fabric and cannot be used with "
            "TfdFabricStrategy. Leave the plugin out and write Fabric(precision='bf16-mixed') or the like."
        )


def check_model(module: torch.nn.Module) -> None:
    """Refuses a model whose parameters belong to a strategy.

    Raises:
        ValueError: they do.
    """
    owned = [name for name, parameter in module.named_parameters() if find_record(parameter) is not None]
    if owned:
        raise ValueError(
            f"{len(owned)} parameter(s) of {type(module).__name__}, such as {owned[0]!r}, were made in the scope of a "
            "strategy, which sums their gradients itself: fabric.setup would sum them a second time. Build the model "
            "outside of strategy.scope(), or in fabric.init_module()."
        )
