"""What is checked of a batch before it is carried out: sizes, dtypes, row numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from tfstyle_dist.core.errors import InvalidArgumentError, NotFoundError
from tfstyle_dist.parameter_server.protocol.header import Header
from tfstyle_dist.parameter_server.protocol.operations import (
    DTYPES,
    MOST_COPIED,
    ROW_OPERATIONS,
    STEPS,
    Op,
    Operation,
    request_bytes,
    tensor_view,
    travels_as,
)
from tfstyle_dist.parameter_server.server.stored_variable import GradientRule, StoredVariable

_KNOWN = frozenset(int(op) for op in Op)


class Table(Protocol):
    """What is looked at."""

    variables: dict[int, StoredVariable]
    rules: dict[int, GradientRule]

    def variable(self, number: int) -> StoredVariable:
        """The variable of a number."""


def check_sizes(table: Table, header: Header, operations: Sequence[Operation]) -> None:
    """Checks that the operations of a batch fit the variables, and its bytes the operations.

    Raises:
        InvalidArgumentError: sizes or dtypes do not fit the variables, or an unknown operation.
        NotFoundError: an unknown variable or optimizer.
    """
    total = copied = largest = 0
    pulled: set[int] = set()
    for operation in operations:
        _check_one(table, operation)
        total += request_bytes(operation)
        if operation.op == Op.PULL and operation.variable not in pulled:
            pulled.add(operation.variable)
        elif operation.op in (Op.PULL, Op.PULL_ROWS):
            size, one = _copied_bytes(table.variables[operation.variable].parameter, operation)
            copied, largest = copied + size, max(largest, one)
    if copied - largest > MOST_COPIED:
        raise InvalidArgumentError(
            f"An answer of {copied} bytes is too long: ask for at most {MOST_COPIED} bytes of rows in one message, "
            "and for each variable once."
        )
    if total != header.data_bytes:
        raise InvalidArgumentError(f"The operations need {total} bytes, but the header announces {header.data_bytes}.")


def _check_one(table: Table, operation: Operation) -> None:
    stored = table.variable(operation.variable)
    parameter = stored.parameter
    if operation.op not in _KNOWN:
        raise InvalidArgumentError(f"Unknown operation {operation.op}.")
    if operation.op == Op.PULL:
        return
    dtype = DTYPES[operation.dtype]
    if not travels_as(operation.op, dtype, parameter.dtype):
        raise InvalidArgumentError(
            f"Variable {stored.name!r} has dtype {parameter.dtype}, but the message carries {dtype}."
        )
    if operation.op in STEPS and operation.extra not in table.rules:
        raise NotFoundError(f"This parameter server has no optimizer {operation.extra}.")
    needed = _numel(stored, operation) * dtype.itemsize
    if operation.nbytes != needed:
        raise InvalidArgumentError(
            f"Variable {stored.name!r} of shape {tuple(parameter.shape)} needs {needed} bytes, but the message "
            f"carries {operation.nbytes}."
        )


def _numel(stored: StoredVariable, operation: Operation) -> int:
    """How many elements come with the operation."""
    if operation.op not in ROW_OPERATIONS:
        return stored.parameter.numel()
    if stored.parameter.dim() == 0 and operation.op != Op.ASSIGN_ELEMENTS:
        raise InvalidArgumentError(f"Variable {stored.name!r} is a scalar and has no rows.")
    if operation.rows > 1 << 32:
        raise InvalidArgumentError(f"{operation.rows} rows in one message are too many.")
    if operation.op == Op.ASSIGN_ELEMENTS:
        return operation.rows
    return 0 if operation.op == Op.PULL_ROWS else operation.rows * row_numel(stored.parameter)


def check_rows(table: Table, operations: Sequence[Operation], data: torch.Tensor) -> None:
    """Nothing of a batch is applied when one of its row numbers is wrong."""
    if not any(operation.op in ROW_OPERATIONS for operation in operations):
        return
    offset = 0
    for operation in operations:
        if operation.op in ROW_OPERATIONS:
            rows = tensor_view(data, offset, 8 * operation.rows, torch.int64)
            _check_numbers(rows, table.variable(operation.variable), operation.op == Op.ASSIGN_ELEMENTS)
        offset += request_bytes(operation)


def _copied_bytes(parameter: torch.Tensor, operation: Operation) -> tuple[int, int]:
    """How many bytes are copied for an answer, and how many at least if it is to be given at all."""
    if operation.op == Op.PULL:
        return parameter.nbytes, parameter.nbytes
    one = row_numel(parameter) * DTYPES[operation.dtype].itemsize
    return operation.rows * one, one


def row_numel(parameter: torch.Tensor) -> int:
    """How many elements a row has."""
    return math.prod(parameter.shape[1:]) if parameter.shape[0] else 0


def _check_numbers(rows: torch.Tensor, stored: StoredVariable, elements: bool) -> None:
    if rows.numel() == 0:
        return
    low, high = (int(number) for number in torch.aminmax(rows))
    count = stored.parameter.numel() if elements else stored.parameter.shape[0]
    if low < 0 or high >= count:
        what, of_what = ("Numbers of elements", "elements") if elements else ("Row numbers", "rows")
        raise InvalidArgumentError(
            f"{what} {low}..{high} do not fit variable {stored.name!r} of {count} {of_what}: give numbers from 0 to "
            f"{count - 1}."
        )
