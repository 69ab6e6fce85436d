"""Writes to some rows of a variable, and reads of some rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core.enums import VariableAggregation, VariableSynchronization
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.cross_device_ops.collective import gather_over_workers, true_device
from tfstyle_dist.runtime.context import current_frame, mixing_error
from tfstyle_dist.values.indexed_slices import as_slices
from tfstyle_dist.variables.component import apart, divided, in_own_memory, write_lock, written
from tfstyle_dist.variables.given_values import tensor_of
from tfstyle_dist.variables.record import Placement, Record

if TYPE_CHECKING:
    from tfstyle_dist.variables.variable import Variable

Rows = tuple[torch.Tensor, torch.Tensor]
"""Values, and the numbers of their rows."""


_APPLY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scatter_add": torch.add,
    "scatter_sub": torch.sub,
    "scatter_mul": torch.mul,
    "scatter_div": divided,
    "scatter_min": torch.minimum,
    "scatter_max": torch.maximum,
    "scatter_update": lambda old, value: value,
    "batch_scatter_update": lambda old, value: value,
    "scatter_nd_add": torch.add,
    "scatter_nd_sub": torch.sub,
    "scatter_nd_update": lambda old, value: value,
}
_SIGNS = {"scatter_add": 1, "scatter_sub": -1, "scatter_nd_add": 1, "scatter_nd_sub": -1}
_NOT_COMBINED = ("scatter_min", "scatter_max", "scatter_update", "scatter_nd_update")


# ---- checks ---------------------------------------------------------------------------------------------------------


def rows_of(op: str, sparse_delta: Any, like: torch.Tensor, name: Callable[[], str]) -> Rows:
    """The rows to write, in one dimension, on the variable's device.

    Args:
        op: name of the method.
        sparse_delta: what the user gave.
        like: has the variable's shape, dtype and device.
        name: tells the variable's name, for messages.

    Raises:
        TypeError: not ``IndexedSlices``, nor a sparse tensor.
        InvalidArgumentError: wrong dtype or shape, or a row that does not exist.
    """
    if op.startswith("scatter_nd"):
        return _rows_of_places(op, sparse_delta[0], sparse_delta[1], like, name)
    slices = as_slices(sparse_delta)
    values, indices = slices.values.detach(), slices.indices.detach().to(true_device(like), torch.int64)
    values = values.to(true_device(like))
    if values.dtype != like.dtype:
        raise InvalidArgumentError(
            f"{op}: variable {name()!r} has dtype {like.dtype}, but the slices have {values.dtype}; write "
            f"values.to({like.dtype})."
        )
    if like.dim() == 0:
        raise InvalidArgumentError(f"{op}: variable {name()!r} is a scalar and has no rows; use assign.")
    if op == "batch_scatter_update":
        return _rows_of_batches(values, indices, like, name)
    row = tuple(like.shape[1:])
    if values.dim() > 0 and tuple(values.shape) != (*indices.shape, *row):
        raise InvalidArgumentError(
            f"{op}: slices of variable {name()!r} must have values.shape = indices.shape + {row}, or one number, got "
            f"values.shape {tuple(values.shape)} and indices.shape {tuple(indices.shape)}."
        )
    _check_range(op, indices, like.shape[0], name)
    return values.expand((*indices.shape, *row)).reshape(-1, *row), indices.reshape(-1)


def _rows_of_batches(values: torch.Tensor, indices: torch.Tensor, like: torch.Tensor, name: Callable[[], str]) -> Rows:
    """``variable[b1, ..., indices[b1, ..., j]] = values[b1, ..., j]``: the last dimension of the indices counts."""
    depth = indices.dim()
    rest = tuple(like.shape[depth:])
    batches = tuple(indices.shape[:-1])
    fits = depth >= 1 and depth <= like.dim() and tuple(values.shape) == (*indices.shape, *rest)
    if not fits or any(b > n for b, n in zip(batches, like.shape, strict=False)):
        raise InvalidArgumentError(
            f"batch_scatter_update: slices of variable {name()!r} of shape {tuple(like.shape)} must have values.shape "
            f"= indices.shape + shape[{depth}:], got values.shape {tuple(values.shape)}, indices.shape "
            f"{tuple(indices.shape)}."
        )
    _check_range("batch_scatter_update", indices, like.shape[depth - 1], name)
    number = torch.zeros_like(indices)
    for axis, size in enumerate(batches):
        place = torch.arange(size, device=indices.device).view([-1 if d == axis else 1 for d in range(depth)])
        number = number * like.shape[axis] + place
    number = number * like.shape[depth - 1] + indices
    return values.reshape(-1, *rest), number.reshape(-1)


def _rows_of_places(op: str, indices: Any, updates: Any, like: torch.Tensor, name: Callable[[], str]) -> Rows:
    """``variable[indices[i, 0], indices[i, 1], ...] = updates[i]``: the first dimensions count as one."""
    device = true_device(like)
    places = torch.as_tensor(indices).detach().to(device, torch.int64)
    if not isinstance(updates, torch.Tensor):
        given = updates
        updates = tensor_of(given, like.dtype, lambda: f"{op}: variable {name()!r} was given the updates {given!r}")
    values = updates.detach().to(device)
    depth = places.shape[-1] if places.dim() else 0
    rest = tuple(like.shape[depth:])
    if not 1 <= depth <= like.dim() or tuple(values.shape) != (*places.shape[:-1], *rest) or values.dtype != like.dtype:
        raise InvalidArgumentError(
            f"{op} of variable {name()!r} of shape {tuple(like.shape)} and dtype {like.dtype}: the last dimension of "
            f"indices must be 1 to {like.dim()}, and updates.shape = indices.shape[:-1] + variable.shape[that:], got "
            f"indices.shape {tuple(places.shape)}, updates.shape {tuple(values.shape)} and {values.dtype}."
        )
    number = places.new_zeros(places.shape[:-1])
    for axis in range(depth):
        _check_range(op, places[..., axis], like.shape[axis], name)
        number = number * like.shape[axis] + places[..., axis]
    return values.reshape(-1, *rest), number.reshape(-1)


def _check_range(op: str, indices: torch.Tensor, size: int, name: Callable[[], str]) -> None:
    if indices.numel() == 0:
        return
    low, high = torch.aminmax(indices)
    if int(low) >= 0 and int(high) < size:
        return
    wrong = ((indices < 0) | (indices >= size)).nonzero()
    place = wrong[0].tolist()
    raise InvalidArgumentError(
        f"{op} of variable {name()!r}: indices{place} = {int(indices[tuple(place)])} is not in [0, {size})."
    )


# ---- writing --------------------------------------------------------------------------------------------------------


def apply_rows(component: torch.Tensor, op: str, rows: Rows) -> None:
    """Writes rows to one copy, those that are named several times in the order given."""
    values, numbers = rows
    apply = _APPLY[op]
    with write_lock, torch.no_grad():
        whole = component.detach()
        flat = whole.reshape(-1, *values.shape[1:])  # a batch scatter counts its rows over several dimensions
        if op in _SIGNS and whole.device.type == "cpu":  # elsewhere index_add_ has no fixed order
            flat.index_add_(0, numbers, values, alpha=_SIGNS[op])
        else:
            for places in [_last(numbers)] if op.endswith("update") else _rounds(numbers):
                chosen = numbers[places]
                flat[chosen] = apply(flat[chosen], values[places])
        if flat.data_ptr() != whole.data_ptr():  # reshape had to copy
            whole.copy_(flat.view(whole.shape))


def _last(numbers: torch.Tensor) -> torch.Tensor:
    """The places of the last occurrences."""
    order = torch.argsort(numbers, stable=True)
    ordered = numbers[order]
    return order[torch.cat([ordered[1:] != ordered[:-1], ordered.new_ones(min(len(ordered), 1), dtype=torch.bool)])]


def _rounds(numbers: torch.Tensor) -> Iterator[torch.Tensor]:
    """Places of the rows such that no row comes twice in a round: first all first occurrences, then the second ones."""
    if len(numbers) < 2:
        yield torch.arange(len(numbers), device=numbers.device)
        return
    order = torch.argsort(numbers, stable=True)
    ordered = numbers[order]
    place = torch.arange(len(numbers), device=numbers.device)
    starts = torch.where(torch.cat([ordered.new_ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]]), place, 0)
    occurrence = torch.empty_like(place)
    occurrence[order] = place - torch.cummax(starts, 0).values
    for number in range(int(occurrence.max()) + 1):
        yield (occurrence == number).nonzero().flatten()


def scatter(variable: Variable, op: str, sparse_delta: Any) -> Any:
    """One scatter write of a variable, in the calling context."""
    record = variable._tfstyle_record
    record.store.ensure_equal()
    strategy, frame = record.store.strategy, current_frame()
    plain = variable._tfstyle_plain()
    if frame is not None and frame.strategy is not strategy and not plain:
        raise mixing_error(strategy, frame.strategy, f"{op} of variable {variable.name!r}")
    index, central = record.index(), record.placement is Placement.CENTRAL
    component = record.components[0 if plain else index or 0]
    rows = rows_of(op, sparse_delta, component, lambda: variable.name)
    try:
        if plain or (frame is not None and frame.component is not None):
            apply_rows(component, op, rows)
            return variable
        if not central:
            _check_supported(variable, op)
        if index is None:
            _apply_to_all(record, op, rows)
        elif not central and record.aggregation is VariableAggregation.NONE:
            apply_rows(component, op, rows)
            return written(variable, component)
        else:
            assert frame is not None
            assert frame.replica is not None

            def write(payloads: list[Rows]) -> list[None]:
                _apply_to_all(record, op, _combined(record, payloads, central))
                return [None] * len(payloads)

            frame.replica.barrier(f"{op} of variable {variable.name!r}", rows, write)
        return variable
    finally:
        record.changes += 1


def _check_supported(variable: Variable, op: str) -> None:
    """As in TensorFlow, whatever the context."""
    if variable._tfstyle_record.synchronization is VariableSynchronization.ON_READ:
        raise NotImplementedError(f"Variables with `synchronization=ON_READ` doesn't support `{op}`: use assign.")
    if op == "batch_scatter_update":
        raise NotImplementedError(
            f"batch_scatter_update of variable {variable.name!r}, which has copies on several replicas: TensorFlow "
            "does not define it. Use scatter_update, or assign."
        )
    sums = variable.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
    if op in _NOT_COMBINED and sums:
        raise NotImplementedError(
            f"{op} is only supported for mirrored variable (variable created within certain `tf.distribute.Strategy` "
            f"scope) with NONE or `ONLY_FIRST_REPLICA` aggregation, got: {variable.aggregation}."
        )


def _apply_to_all(record: Record, op: str, rows: Rows) -> None:
    """Writes to every copy, once to those that share their storage."""
    values, numbers = apart(rows[0], record), rows[1]
    for component in in_own_memory(record):
        device = true_device(component)
        apply_rows(component, op, (values.to(device), numbers.to(device)))


def _combined(record: Record, payloads: list[Rows], central: bool) -> Rows:
    """What the replicas of all workers write together.

    The rows of a sum are those of all replicas one after the other, and each is applied; those of a mean are divided by
    the number of replicas. One central copy takes every replica's write, whatever the aggregation.
    """
    worker, first = record.store.worker, record.aggregation is VariableAggregation.ONLY_FIRST_REPLICA and not central
    device = payloads[0][0].device
    local = payloads[:1] if first else payloads
    values = torch.cat([v.to(device) for v, _ in local])
    numbers = torch.cat([n.to(device) for _, n in local])
    if worker.group.size > 1 and not (first and not record.store.first_replica_is_global):
        name = f"rows of variable {record.local_name!r}"
        counts = worker.group.numbers(len(numbers), f"{name} (counts)")
        values = gather_over_workers(worker, [values], 0, name)
        numbers = gather_over_workers(worker, [numbers], 0, f"{name} (numbers)")
        if first:
            values, numbers = values[: counts[0]], numbers[: counts[0]]
    if record.aggregation is VariableAggregation.MEAN and not central:
        values = values / worker.num_replicas
    return values.to(record.components[0].dtype), numbers


# ---- reading --------------------------------------------------------------------------------------------------------


def read_rows(value: torch.Tensor, indices: Any, name: str) -> torch.Tensor:
    """``value[indices]`` for row numbers of any shape; differentiable."""
    numbers = torch.as_tensor(indices, device=true_device(value)).to(torch.int64)
    if value.dim() == 0:
        raise InvalidArgumentError(
            f"sparse_read of variable {name!r}: it is a scalar and has no rows; read it with value()."
        )
    _check_range("sparse_read", numbers, value.shape[0], lambda: name)
    return value[numbers]


def read_places(value: torch.Tensor, indices: Any, name: str) -> torch.Tensor:
    """``value[indices[..., 0], indices[..., 1], ...]``; differentiable."""
    places = torch.as_tensor(indices, device=true_device(value)).to(torch.int64)
    if places.dim() == 0 or places.shape[-1] > value.dim():
        raise InvalidArgumentError(
            f"gather_nd of variable {name!r} of shape {tuple(value.shape)}: the last dimension of indices must be at "
            f"most {value.dim()}, got indices.shape {tuple(places.shape)}."
        )
    for axis in range(places.shape[-1]):
        _check_range("gather_nd", places[..., axis], value.shape[axis], lambda: name)
    if places.shape[-1] == 0:
        return value.expand(*places.shape[:-1], *value.shape)
    return value[tuple(places.unbind(-1))]
