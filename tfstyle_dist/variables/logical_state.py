"""What a tensor is worth, whatever the numbers of workers, replicas and servers: one value, to save and to put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tfstyle_dist.comm import mesh
from tfstyle_dist.core.enums import ReduceOp, VariableAggregation, VariableSynchronization
from tfstyle_dist.cross_device_ops.collective import local_sum, reduce_over_workers
from tfstyle_dist.variables.known_tensors import find_record
from tfstyle_dist.variables.record import Placement, Record, raw
from tfstyle_dist.variables.variable import Variable


@dataclass
class LogicalTensor:
    """One value for all copies of a tensor.

    Attributes:
        value: a plain tensor on any device; it may share memory with the first replica's copy.
        same_on_all: whether every worker of the owning strategy is sure to have this value.
        facts: ``kind``, and for a strategy's tensors ``synchronization`` and ``aggregation``.
    """

    value: torch.Tensor
    same_on_all: bool
    facts: dict[str, Any] = field(default_factory=dict)


def read_logical(tensors: Sequence[torch.Tensor]) -> list[LogicalTensor]:
    """The values of some tensors as a checkpoint holds them.

    ``ON_READ`` variables and floating buffers are read across the replicas: collective over the workers, to be called
    with the same tensors on all of them, in cross-replica context.

    Args:
        tensors: variables, parameters and buffers of strategies, or plain tensors.

    Raises:
        ValueError: an ``ON_READ`` variable of aggregation NONE, which has no single value.

    Source: how ``tf.train.Checkpoint`` saves distributed variables.
    """
    read: list[LogicalTensor] = []
    settled: list[Any] = []
    means: dict[tuple[int, torch.dtype, torch.device], list[tuple[Record, LogicalTensor]]] = {}
    for tensor in tensors:
        record = find_record(tensor)
        if record is None:
            read.append(LogicalTensor(tensor.detach(), False, {"kind": "tensor"}))
            continue
        record.store.ensure_equal()
        if record.kind == "buffer" and record.store not in settled:  # it looks at all that the strategy has
            record.store.settle()
            settled.append(record.store)
        on_read = record.synchronization is VariableSynchronization.ON_READ
        mean = record.aggregation is VariableAggregation.MEAN
        facts = {
            "kind": record.kind,
            "synchronization": record.synchronization.name,
            "aggregation": record.aggregation.name,
        }
        if isinstance(tensor, Variable):
            remote = record.placement is Placement.REMOTE
            value = tensor.value() if on_read or remote else record.components[0].detach()
            combined = mean or record.aggregation is VariableAggregation.SUM
            read.append(LogicalTensor(value, combined, facts))
            continue
        if record.placement is Placement.REMOTE:
            read.append(LogicalTensor(tensor.detach(), True, facts))
            continue
        found = LogicalTensor(record.components[0].detach(), record.kind == "parameter" or mean, facts)
        if record.kind == "buffer" and mean and record.store.worker.num_replicas > 1:
            means.setdefault((id(record.store), found.value.dtype, found.value.device), []).append((record, found))
        read.append(found)
    for group in means.values():
        _average(group)
    return read


def _average(group: Sequence[tuple[Record, LogicalTensor]]) -> None:
    """Fills in the means over all replicas, in one message."""
    worker = group[0][0].store.worker
    with torch.no_grad(), raw():
        parts = [local_sum([c.detach() for c in record.components]).reshape(-1) for record, _ in group]
        flat = reduce_over_workers(worker, ReduceOp.MEAN, torch.cat(parts), "buffers of a checkpoint")
        for (_, found), mean in zip(group, flat.split([part.numel() for part in parts]), strict=True):
            found.value = mean.view(found.value.shape)


def _has_no_value(record: Record) -> bool:
    """Whether copies of a variable cannot be read as one value: a checkpoint has one only if other policies made it."""
    none, on_read = VariableAggregation.NONE, VariableSynchronization.ON_READ
    return (record.synchronization, record.aggregation) == (on_read, none) and record.placement is not Placement.REMOTE


def write_logical(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Puts a value back on all replicas: an ``ON_READ`` SUM variable is divided by their number.

    Args:
        tensor: as for ``read_logical``; collective over the workers if it is an ``ON_READ`` variable.
        value: of the same shape; a variable also wants the same dtype.

    Raises:
        InvalidArgumentError: a value of another shape or dtype for a variable.
    """
    if isinstance(tensor, Variable):
        record = tensor._tfstyle_record
        if _has_no_value(record):  # ``assign`` would read it
            for component in record.components:
                component.assign(value)  # type: ignore[attr-defined]
            record.changes += 1
        else:
            tensor.assign(value)
        return
    if mesh.is_divided(tensor):
        mesh.write_whole(tensor, value)
        return
    with torch.no_grad():
        tensor.copy_(value)
