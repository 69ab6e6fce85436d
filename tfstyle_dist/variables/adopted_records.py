"""The records of what a strategy takes over from modules: plain parameters and buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.comm import mesh
from tfstyle_dist.core import sparse_parts
from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.variables.first_values import has_sums
from tfstyle_dist.variables.gradient_policy import GradientPolicy
from tfstyle_dist.variables.known_tensors import WeakComponents
from tfstyle_dist.variables.partitioned import LocalPart
from tfstyle_dist.variables.record import Placement, Record
from tfstyle_dist.variables.replica_copies import BufferCopies, ParameterCopies

if TYPE_CHECKING:
    from tfstyle_dist.variables.store import ParameterStore


def parameter_record(store: ParameterStore, parameter: torch.nn.Parameter) -> Record:
    """The record of a parameter; with one local replica it stays a plain ``nn.Parameter``."""
    components: Any = [parameter]
    if store.contents is not None:
        components = ParameterCopies(store.contents, parameter)
    record = Record(store, parameter, components, "parameter", policy=GradientPolicy())
    if store.contents is None and mesh.is_divided(parameter):
        _take_divided(store, record, parameter)
    elif store.contents is None:
        # The store must not keep the user's parameter alive: with one replica the record refers to it weakly.
        record.components = WeakComponents(record)
    return record


def _take_divided(store: ParameterStore, record: Record, parameter: torch.nn.Parameter) -> None:
    """A parameter in parts over the model mesh, or one that somebody else (FSDP) divides and reduces."""
    record.components, record.placement = WeakComponents(record, LocalPart), Placement.SHARDED
    if store.model_mesh is not None and mesh.is_on(parameter, store.model_mesh):
        return
    over = mesh.num_workers(parameter)
    if over < store.worker.group.size:
        raise ValueError(
            f"A parameter is divided over {over} of {store.worker.group.size} workers, and nobody would sum its "
            "gradients over the others. Make the strategy with logical_devices_per_replica, and divide with it."
        )
    record.policy = GradientPolicy("elsewhere")


def buffer_record(store: ParameterStore, buffer: torch.Tensor, module: torch.nn.Module | None) -> Record:
    """The record of a buffer: dense floating ones that can be added are ON_READ + MEAN, others ONLY_FIRST_REPLICA.

    Raises:
        TypeError: several workers cannot be given such a buffer.
    """
    dense = sparse_parts.is_plain(buffer)
    several = store.worker.group.size > 1 or store.make_equal is not None
    if several and not dense and not sparse_parts.is_sparse(buffer):
        raise TypeError(
            f"A buffer of layout {buffer.layout}{' that is nested' * buffer.is_nested} and type {buffer.dtype} cannot "
            "be sent to the other workers. Keep it as a plain attribute of the module, or make it dense or sparse."
        )
    mean = dense and (buffer.is_floating_point() or buffer.is_complex()) and has_sums(buffer.dtype)
    aggregation = VariableAggregation.MEAN if mean else VariableAggregation.ONLY_FIRST_REPLICA
    record = Record(store, buffer, [buffer], "buffer", VariableSynchronization.ON_READ, aggregation)
    if store.contents is not None and module is not None:
        record.components = BufferCopies(store.contents)  # type: ignore[assignment]
    else:
        record.components = WeakComponents(record)
    return record


def tie_buffer(record: Record, module: torch.nn.Module, name: str, known: list[Record]) -> None:
    """A module has a buffer now, maybe one that other modules have or had, as after ``convert_sync_batchnorm``.

    Args:
        record: of the buffer.
        module: looked at first for the buffer, as long as it lives.
        name: of the buffer there.
        known: the records that live with the module.
    """
    if record not in known:
        known.append(record)
    if isinstance(record.components, BufferCopies):
        record.components.register(module, name)
