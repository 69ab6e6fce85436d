"""Reading only some rows of a table on the servers, and gradients that touch only those."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord


class _Lookup(torch.autograd.Function):
    """Rows by number; the table's gradient is sparse.

    The table itself takes part as an anchor only: its local copy is never read, so its memory is never touched.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        rows: torch.Tensor,
        numbers: torch.Tensor,
        position: torch.Tensor | None,
        padding: int | None,
    ) -> Any:
        ctx.save_for_backward(numbers, position)
        ctx.shape, ctx.padding = anchor.shape, padding
        return rows if position is None else _spread(rows, position)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        numbers, position = ctx.saved_tensors
        values = grad.reshape(-1, *ctx.shape[1:])
        if position is not None:
            added = values.new_zeros((len(numbers), *ctx.shape[1:]))
            values = added.index_add_(0, position.reshape(-1), values)
        numbers = numbers.reshape(-1)
        if ctx.padding is not None:
            learns = numbers != ctx.padding
            numbers, values = numbers[learns], values[learns]
        table = torch.sparse_coo_tensor(
            numbers[None], values, ctx.shape, is_coalesced=position is not None, check_invariants=False
        )
        return table, None, None, None, None


def _spread(rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return rows.index_select(0, position.reshape(-1)).reshape(*position.shape, *rows.shape[1:])


def _distinct(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The different numbers, and of each number its place among them. NumPy sorts some times faster than torch."""
    found, position = np.unique(numbers.detach().cpu().reshape(-1).numpy(), return_inverse=True)
    return torch.from_numpy(found), torch.from_numpy(position).view(numbers.shape)


def _from_beginning(numbers: torch.Tensor, record: RemoteRecord) -> torch.Tensor:
    """Row numbers of which negative ones count from the end.

    Raises:
        InvalidArgumentError: one is out of range.
    """
    count = record.components[0].shape[0]
    low, high = (int(number) for number in torch.aminmax(numbers))
    if low < -count or high >= count:
        raise InvalidArgumentError(
            f"Row numbers {low}..{high} do not fit variable {record.describe()!r} of {count} rows: give numbers from "
            f"{-count} to {count - 1}; negative ones count from the end."
        )
    return torch.where(numbers < 0, numbers + count, numbers)


def lookup(
    record: RemoteRecord, numbers: torch.Tensor, padding: int | None = None, from_end: bool = False
) -> torch.Tensor:
    """Rows of a tensor on the servers: ``table[numbers]``.

    Over a network each row is pulled once and its gradients are added up here; on one host finding rows that are named
    twice would cost more than copying them twice.

    Args:
        record: the table.
        numbers: int row numbers of any shape.
        padding: number of a row that gets no gradient; negative: from the end.
        from_end: negative numbers count from the end; otherwise they are refused.

    Returns:
        A tensor of shape ``(*numbers.shape, *row shape)`` whose gradient reaches the table as a sparse tensor.
    """
    servers: Any = record.store.servers  # type: ignore[attr-defined]
    wanted, position = numbers.to(torch.int64), None
    if from_end and (wanted < 0).any():
        wanted = _from_beginning(wanted, record)
    if not servers.is_near(record):
        wanted, position = _distinct(wanted)
    rows: torch.Tensor = servers.pull_rows(record, wanted.reshape(-1))
    if position is None and numbers.dim() != 1:
        rows = rows.view(*numbers.shape, *rows.shape[1:])
    anchor = record.components[0]
    record.looked_up = servers.steps or -1
    if torch.is_grad_enabled() and anchor.requires_grad:
        if padding is not None and padding < 0:
            padding += len(anchor)
        return _Lookup.apply(anchor, rows, wanted, position, padding)  # type: ignore[no-any-return,no-untyped-call]
    return rows if position is None else _spread(rows, position)


def bound_rows(record: RemoteRecord, numbers: torch.Tensor, max_norm: float, norm_type: float) -> None:
    """What ``max_norm`` of an embedding does to a table on the servers: rows that are longer become so long.

    Args:
        record: the table.
        numbers: of the rows that are looked at; any shape.
        max_norm: the largest norm.
        norm_type: the exponent of the norm.
    """
    servers: Any = record.store.servers  # type: ignore[attr-defined]
    wanted, _ = _distinct(numbers.to(torch.int64))
    with torch.no_grad():
        rows = servers.pull_rows(record, wanted)
        bounded = torch.embedding_renorm_(rows.clone(), torch.arange(len(rows)), max_norm, norm_type)
        # All of them, also if none is too long: a function that is tried again is to make the same writes.
        servers.add_rows(record, wanted, bounded - rows)


def row_numbers(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, torch.Tensor, int | None, bool] | None:
    """What ``lookup`` takes, with the table in the record's place, if ``func`` is a way of torch to pick rows."""
    if func is torch.nn.functional.embedding:  # torch gives the other arguments by name
        plain = kwargs.get("max_norm") is None and not kwargs.get("scale_grad_by_freq")
        return (args[1], args[0], kwargs.get("padding_idx"), False) if plain else None
    if func is torch.Tensor.__getitem__ and _is_numbers(args[1]):
        return args[0], args[1], None, True
    if func in (torch.index_select, torch.Tensor.index_select) and len(args) == 3 and args[1] == 0:
        return args[0], args[2], None, False
    return None


def _is_numbers(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32) and index.dim() > 0
