"""One replica's copy of a variable, and what writing to copies and combining them means."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.enums import ReduceOp, VariableAggregation, VariableSynchronization
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.core.untraced import untraced
from tfstyle_dist.cross_device_ops.collective import reduce_over_workers, true_device, widened
from tfstyle_dist.values import PerReplica, Share, may_be_nan, without_nothing
from tfstyle_dist.variables.given_values import tensor_of
from tfstyle_dist.variables.record import Record
from tfstyle_dist.variables.replicated import Replicated
from tfstyle_dist.variables.rows import RowMethods
from tfstyle_dist.variables.value_methods import ValueMethods

write_lock = threading.Lock()

_APPLY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "assign": lambda old, value: value,
    "assign_add": lambda old, value: old + value,
    "assign_sub": lambda old, value: old - value,
}


class VariableComponent(RowMethods, ValueMethods, torch.nn.Parameter):  # type: ignore[misc]  # scatter_add takes TF's arguments too
    """One replica's copy of a variable: what ``experimental_local_results`` gives and ``extended.update`` passes."""

    _tfstyle_name: str
    _tfstyle_device: torch.device

    def value(self) -> torch.Tensor:
        """The copy's value, a new tensor."""
        return self.detach().clone()

    read_value = value

    @property
    def name(self) -> str:
        """The variable's name; ``/replica_k`` is added from the second replica on."""
        return self._tfstyle_name

    @property
    @untraced
    def device(self) -> torch.device:  # type: ignore[override]  # a logical CPU keeps its index
        """The replica's device as the user counts it (a logical CPU keeps its index)."""
        if torch_internals.compiling() is not None:  # torch asks, and means the memory
            return true_device(self)
        return self._tfstyle_device

    def _tfstyle_scatter(self, op: str, sparse_delta: Any) -> VariableComponent:
        from tfstyle_dist.variables.scatter import apply_rows, rows_of

        apply_rows(self, op, rows_of(op, sparse_delta, self, lambda: self._tfstyle_name))
        return self

    def _assign(self, op: str, value: Any) -> VariableComponent:
        write_component(self, op, checked(value, self, self._tfstyle_name))
        return self


def written(variable: Any, copy: torch.Tensor) -> Any:
    """What a write to one copy gives back: that copy, where each replica may give its own another value.

    The variable itself would stand for the first copy in ``Strategy.reduce``.

    Args:
        variable: was written to.
        copy: the one that was.
    """
    record = variable._tfstyle_record
    differs = record.aggregation is VariableAggregation.NONE and record.store.worker.num_replicas > 1
    on_write = record.synchronization is VariableSynchronization.ON_WRITE
    return copy if differs and on_write and record.updating() is None else variable


def checked(value: Any, like: torch.Tensor, name: str) -> torch.Tensor:
    """``value`` as a tensor that fits the variable.

    Raises:
        InvalidArgumentError: wrong shape or dtype, or numbers that the dtype cannot hold.
    """
    if isinstance(value, Replicated):
        value = value._tfstyle_value()
    where = true_device(like)
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        if tensor.dtype != like.dtype:
            raise InvalidArgumentError(
                f"Variable {name!r} has dtype {like.dtype}, but the assigned tensor has {tensor.dtype}; write "
                f"value.to({like.dtype})."
            )
        tensor = tensor.to(where)
    else:
        tensor = tensor_of(value, like.dtype, lambda: f"Variable {name!r} was assigned {value!r}").to(where)
    if tensor.shape != like.shape:
        raise InvalidArgumentError(
            f"Variable {name!r} has shape {tuple(like.shape)}, but the assigned value has shape {tuple(tensor.shape)}; "
            "write value.reshape(variable.shape) or value.expand(variable.shape) if that is meant."
        )
    return tensor


def per_component(value: Any, count: int) -> list[Any]:
    """The value for each component: a PerReplica's own entries, else the same for all."""
    if not isinstance(value, PerReplica):
        return [value] * count
    if len(value.values) < count:
        raise InvalidArgumentError(
            f"{value!r} has {len(value.values)} value(s) for {count} local replicas; give one for each, e.g. with "
            "strategy.experimental_distribute_values_from_function."
        )
    return list(value.values)


def divided(value: torch.Tensor, by: torch.Tensor | int) -> torch.Tensor:
    """A quotient of the value's dtype: of whole numbers it is cut towards zero, as TensorFlow does."""
    return torch.div(value, by, rounding_mode=None if value.is_floating_point() or value.is_complex() else "trunc")


def apart(value: torch.Tensor, record: Record) -> torch.Tensor:
    """The value, outside of the memory of a variable's copies: the first one is written to before the others are."""
    if len(record.components) == 1 or not value.numel():
        return value
    lies_in = value.untyped_storage().data_ptr()
    return value.clone() if any(c.untyped_storage().data_ptr() == lies_in for c in record.components) else value


def write_component(component: torch.Tensor, op: str, value: torch.Tensor) -> None:
    """Applies one write to one copy, wherever the value is; replica threads that write the same copy take turns."""
    with write_lock, torch.no_grad():
        component.copy_(_APPLY[op](component, value.to(true_device(component))))


def write_all(record: Record, op: str, value: torch.Tensor) -> None:
    """Applies one write to every copy, once to those that share their storage."""
    for component in in_own_memory(record):
        write_component(component, op, value)


def in_own_memory(record: Record) -> list[torch.Tensor]:
    """The copies, of those that share their storage one."""
    if len(record.components) == 1:  # also where a tensor has no address, as on XLA devices
        return list(record.components)
    found: dict[int, torch.Tensor] = {}
    for component in record.components:
        found.setdefault(component.data_ptr() or id(component), component)
    return list(found.values())


def without_nan(op: str, value: torch.Tensor, component: torch.Tensor) -> torch.Tensor:
    """What a replica without examples writes to its copy: what it computed of nothing, NaN, leaves the copy as it is.

    Args:
        op: ``assign``, ``assign_add`` or ``assign_sub``.
        value: of the copy's shape and dtype.
        component: the copy.
    """
    return torch.where(value.isnan(), component.detach() if op == "assign" else torch.zeros_like(value), value)


def combine(record: Record, values: Sequence[torch.Tensor], shares: Sequence[Share | None] = ()) -> torch.Tensor:
    """The value that all replicas of all workers write together.

    Args:
        record: the variable.
        values: of the local replicas.
        shares: of which examples each was computed, if that is known.
    """
    worker = record.store.worker
    if record.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        first = values[0].detach().clone()
        if worker.group.size > 1 and record.store.first_replica_is_global:
            worker.group.broadcast(first, 0, f"first replica's value of {record.local_name!r}")
        return first
    op = ReduceOp.SUM if record.aggregation is VariableAggregation.SUM else ReduceOp.MEAN
    known = [s for s in shares if s is not None and s.some_empty]
    if known and len(known) == len(values) and may_be_nan(values):
        kept, counted = without_nothing(values, known)
        total = _reduced(record, ReduceOp.SUM, kept)
        return total / _reduced(record, ReduceOp.SUM, counted) if op is ReduceOp.MEAN else total
    return _reduced(record, op, values)


def _reduced(record: Record, op: ReduceOp, values: Sequence[torch.Tensor]) -> torch.Tensor:
    worker = record.store.worker
    total = record.store.ops.sum_values(widened(worker, values))
    return reduce_over_workers(worker, op, total, f"variable {record.local_name!r}").to(values[0].dtype)


def read_across_replicas(record: Record, name: str) -> torch.Tensor:
    """The aggregated value of an ON_READ variable.

    Raises:
        ValueError: its aggregation is NONE.
    """
    if record.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"ON_READ variable {name!r} has aggregation NONE: its copies cannot be read in cross-replica context. Read "
            "it inside strategy.run, take experimental_local_results(variable), or give it an aggregation."
        )
    with torch.no_grad():
        return combine(record, [c.detach() for c in record.components])
