"""What ``assign``, ``assign_add`` and ``assign_sub`` of a variable mean in each context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.runtime.context import Frame, Replica, current_frame, entered, mixing_error
from tfstyle_dist.values import PerReplica, Share
from tfstyle_dist.variables.component import (
    apart,
    checked,
    combine,
    divided,
    per_component,
    read_across_replicas,
    without_nan,
    write_all,
    write_component,
    written,
)
from tfstyle_dist.variables.record import Placement, Record
from tfstyle_dist.variables.replicated import Replicated

if TYPE_CHECKING:
    from tfstyle_dist.variables.variable import Variable


def assign(variable: Variable, op: str, value: Any) -> Any:
    """Writes to a variable in the context that this thread is in.

    Args:
        variable: the variable.
        op: ``assign``, ``assign_add`` or ``assign_sub``.
        value: what it is given.

    Returns:
        What the method of this name returns.
    """
    record = variable._tfstyle_record
    record.store.ensure_equal()
    strategy, frame = record.store.strategy, current_frame()
    if frame is not None and frame.strategy is not strategy and not variable._tfstyle_plain():
        raise mixing_error(strategy, frame.strategy, f"assigning variable {variable.name!r}")
    index = record.index()
    if isinstance(value, PerReplica) and frame is not None and frame.replica is not None:
        value = per_component(value, frame.replica.local_replica_id + 1)[frame.replica.local_replica_id]
    if variable._tfstyle_plain():
        component = record.components[0]
        write_component(component, op, checked(value, component, variable.name))
        return variable
    if index is None:
        return _in_cross_replica_context(variable, op, value)
    assert frame is not None
    component = record.components[index]
    local = (
        frame.component is not None
        or record.synchronization is VariableSynchronization.ON_READ
        or record.aggregation is VariableAggregation.NONE
    )
    if local:
        if frame.component is None and record.placement is Placement.CENTRAL and strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"You must specify an aggregation method to update the variable {variable.name!r} in replica context: "
                "under central storage it has one copy, and aggregation NONE does not say how the replicas' values "
                "combine. Create it with aggregation SUM, MEAN or ONLY_FIRST_REPLICA."
            )
        value = checked(value, component, variable.name)
        share = None if frame.replica is None else frame.replica.share
        if share is not None and share.examples == 0:
            value = without_nan(op, value, component)
        write_component(component, op, value)
        return written(variable, component)
    assert frame.replica is not None
    _together(variable, op, value, frame.replica)
    return variable


def write_of_operator(variable: Variable, op: str, value: Any) -> bool:
    """Writes what ``v += x`` or ``v -= x`` adds in a replica, where a write combines the replicas' values.

    Args:
        variable: any; of others torch writes to the copy that the calling thread means.
        op: ``assign_add`` or ``assign_sub``.
        value: what torch adds to such a tensor, also of a dtype or shape that it converts.

    Returns:
        Whether it has been written.
    """
    record = variable._tfstyle_record
    index, several = record.index(), record.store.worker.num_replicas > 1
    local = record.synchronization is VariableSynchronization.ON_READ or (
        record.aggregation is VariableAggregation.NONE and record.placement is not Placement.CENTRAL
    )
    if index is None or not several or local or record.updating() is not None or variable._tfstyle_plain():
        return False
    value, copy = value._tfstyle_value() if isinstance(value, Replicated) else value, record.components[index]
    has_graph = copy.requires_grad and torch.is_grad_enabled()
    numbers = isinstance(value, torch.Tensor | int | float | complex)
    if has_graph or not numbers or not torch.can_cast(torch.result_type(copy, value), copy.dtype):
        return False  # torch says what is wrong, here and below
    if isinstance(value, torch.Tensor) or record.aggregation is not VariableAggregation.SUM:
        value = torch.as_tensor(value).detach().to(copy.dtype)
        if value.dim() > copy.dim() or torch.broadcast_shapes(value.shape, copy.shape) != copy.shape:
            return False
        value = value.expand(copy.shape)
    variable._assign(op, value)
    return True


def _together(variable: Variable, op: str, value: Any, replica: Replica) -> None:
    """ON_WRITE with SUM, MEAN or ONLY_FIRST_REPLICA in replica context: one joint write."""
    record = variable._tfstyle_record
    aggregation, worker = record.aggregation, record.store.worker
    if aggregation is VariableAggregation.SUM and not isinstance(value, torch.Tensor) and worker.num_replicas > 1:
        raise ValueError(
            f"{value!r} cannot be reduced: variable {variable.name!r} has aggregation SUM over {worker.num_replicas} "
            "replicas, and a Python value is the same on all of them, so its sum is not defined. Pass a tensor, "
            f"e.g. variable.{op}(torch.tensor({value!r}))."
        )
    value = checked(value, record.components[replica.local_replica_id], variable.name)
    is_whole = not (value.is_floating_point() or value.is_complex())
    if aggregation is VariableAggregation.MEAN and is_whole and worker.num_replicas > 1:
        raise ValueError(
            f"{op} of variable {variable.name!r}: the mean of {worker.num_replicas} replicas' values is no "
            f"{value.dtype}. Create it with aggregation SUM or ONLY_FIRST_REPLICA, or with a float dtype."
        )

    def write(given: list[tuple[torch.Tensor, Share | None]]) -> list[None]:
        values, shares = zip(*given, strict=True)
        write_all(record, op, combine(record, values, shares))
        return [None] * len(values)

    replica.barrier(f"{op} of variable {variable.name!r}", (value, replica.share), write)


def _in_cross_replica_context(variable: Variable, op: str, value: Any) -> Any:
    record = variable._tfstyle_record
    first, on_read = record.components[0], record.synchronization is VariableSynchronization.ON_READ
    count = len(record.copies())
    values = [apart(checked(v, first, variable.name), record) for v in _per_copy(value, record)[:count]]
    if not on_read:
        if len({id(v) for v in values}) > 1:
            for component, part in zip(record.components, values, strict=True):
                write_component(component, op, part)
        else:
            write_all(record, op, values[0])
        return variable
    if record.aggregation is VariableAggregation.SUM:
        if op != "assign":
            raise ValueError(
                f"{op} of ON_READ variable {variable.name!r} with aggregation SUM is not defined in cross-replica "
                "context: each replica holds a part of the sum. Call it inside strategy.run, or use assign."
            )
        count = record.store.worker.num_replicas
        values = [divided(v, count) for v in values]
    for component, part in zip(record.components, values, strict=True):
        write_component(component, op, part)
    return read_across_replicas(record, variable.name)


def _per_copy(value: Any, record: Record) -> list[Any]:
    """What each copy is given: of a variable with copies its own one, of a ``PerReplica`` its own entry."""
    if not isinstance(value, Replicated):
        return per_component(value, len(record.copies()))
    if record.synchronization is VariableSynchronization.ON_READ:  # read once: that may be a call of all workers
        return per_component(value._tfstyle_value(), len(record.copies()))
    given = []
    for component in range(len(record.copies())):
        with entered(Frame(record.store.strategy, component=component)):
            given.append(value._tfstyle_value())
    return given
