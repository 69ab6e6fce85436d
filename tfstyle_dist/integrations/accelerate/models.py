"""What each strategy puts around a model that accelerate prepares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.integrations.accelerate.wrappers import Adopted, LocalReplicas, Wrapped
from tfstyle_dist.integrations.data_parallel import is_elastic
from tfstyle_dist.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    ParameterServerStrategy,
)
from tfstyle_dist.variables import find_record

if TYPE_CHECKING:
    from tfstyle_dist.strategies import Strategy

_KINDS = (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    CentralStorageStrategy,
    ParameterServerStrategy,
)


def check_kind(strategy: Any) -> None:
    """Refuses a strategy that accelerate's loop cannot train under; ``None`` is left to be chosen.

    Raises:
        TypeError: it is of another kind.
        ValueError: it is elastic.
    """
    if strategy is not None and not isinstance(strategy, _KINDS):
        names = ", ".join(kind.__name__ for kind in _KINDS)
        raise TypeError(
            f"strategy must be one of {names}, got {strategy!r}. On TPUs accelerate sums gradients itself: use "
            "accelerate.Accelerator, or TPUStrategy with a loop of its own."
        )
    if strategy is not None and is_elastic(strategy):
        raise ValueError(
            f"StrategyAccelerator cannot take {strategy!r}: the workers of an elastic job change, accelerate's "
            "processes do not, and each worker would train alone. Write the loop with strategy.run instead "
            "(docs/elastic.md), or leave elastic= out."
        )


@dataclass
class Plan:
    """What to ask of ``Accelerator.prepare_model``.

    Attributes:
        model: the model, maybe with something around it.
        device_placement: as the argument.
        evaluation_mode: as the argument; True keeps ``DistributedDataParallel`` away.
    """

    model: torch.nn.Module
    device_placement: bool | None
    evaluation_mode: bool


def plan(strategy: Strategy, model: torch.nn.Module, device_placement: bool | None, evaluation_mode: bool) -> Plan:
    """How a model is prepared under a strategy.

    Args:
        strategy: the strategy.
        model: as it came from the script.
        device_placement: as the argument of ``prepare_model``.
        evaluation_mode: likewise.

    Raises:
        ValueError: the model was built in the scope of a strategy with several local replicas.
    """
    as_it_is = Plan(model, device_placement, evaluation_mode)
    if isinstance(model, Wrapped | torch.nn.parallel.DistributedDataParallel):
        return as_it_is
    owned = _is_owned(strategy, model)
    if isinstance(strategy, ParameterServerStrategy) or (
        isinstance(strategy, CentralStorageStrategy) and strategy.worker.group.size > 1
    ):
        strategy.experimental_adopt(model)
        return Plan(Adopted(model, strategy), False, True)
    several = strategy.worker.num_local_replicas > 1
    if owned and several:
        raise ValueError(
            f"The model was built in the scope of {strategy!r}, which has several replicas in this process: accelerate "
            "calls the model outside of strategy.run. Build the model outside of the scope; prepare() divides each "
            "batch over the replicas."
        )
    if owned:
        return Plan(Adopted(model, strategy), device_placement, True)
    if isinstance(strategy, CentralStorageStrategy):
        home = strategy.parameter_store.parameter_device
        assert home is not None
        if several or home.torch_device != strategy.worker.torch_device(0):
            return Plan(LocalReplicas(model.to(home.torch_device), strategy), False, evaluation_mode)
        return as_it_is
    return Plan(LocalReplicas(model, strategy), device_placement, evaluation_mode) if several else as_it_is


def _is_owned(strategy: Strategy, model: torch.nn.Module) -> bool:
    records = [find_record(parameter) for parameter in model.parameters()]
    return any(record is not None and record.store is strategy.parameter_store for record in records)


def check_joins(models: Any) -> None:
    """Raises ValueError for models of the strategy: nothing stands in for a process that has no more batches."""
    for model in models:
        if isinstance(model, Adopted) and model.strategy.worker.group.size > 1:
            raise ValueError(
                f"join_uneven_inputs needs models of DistributedDataParallel, but a {type(model.module).__name__} "
                f"belongs to {model.strategy!r}. Build it outside of strategy.scope() under a MirroredStrategy, or "
                "give every process as many batches (even_batches=True)."
            )
