"""The variables of one parameter server, and every change to them.

One thread at a time works on a table, so each operation is atomic. Writes made by scheduled functions are counted for
each function and variable: when a function is started again because its worker was lost, the writes that its earlier
attempt made are recognised by their number and are not applied twice.
"""

from __future__ import annotations

import bisect
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tfstyle_dist.core.errors import CancelledError, InvalidArgumentError, NotFoundError
from tfstyle_dist.parameter_server.protocol.byte_streams import Tensors
from tfstyle_dist.parameter_server.protocol.header import Header
from tfstyle_dist.parameter_server.protocol.operations import (
    DTYPES,
    FLAG_DUPLICATE,
    FLAG_UNCHANGED,
    MOST_COPIED,
    ROW_OPERATIONS,
    WRITES,
    Answer,
    Op,
    Operation,
    dtype_number,
    tensor_view,
    travels_as,
)
from tfstyle_dist.parameter_server.server.shared_variables import SharedVariables
from tfstyle_dist.parameter_server.server.stored_variable import GradientRule, StoredVariable, descend, write

_KNOWN = frozenset(int(op) for op in Op)
_Steps = dict[int, list[tuple[torch.Tensor, StoredVariable]]]
"""Gradients that optimizers are to apply together."""


@dataclass(slots=True)
class ClosureWrites:
    """What a scheduled function has written so far."""

    attempt: int = 0
    writes: dict[int, int] = field(default_factory=dict)


class VariableTable:
    """The state of one parameter server."""

    def __init__(self) -> None:
        self.variables: dict[int, StoredVariable] = {}
        self.rules: dict[int, GradientRule] = {}
        self.low_water = 0
        self._below = 0  # see settle
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.applied = 0
        self.duplicates = 0
        self.shared = SharedVariables()
        self.closures: dict[int, ClosureWrites] = {}
        self.calls = 0

    # ---- variables --------------------------------------------------------------------------------------------

    def create(self, number: int, name: str, shape: Sequence[int], dtype: torch.dtype, value: torch.Tensor) -> None:
        """Adds a variable with its first value; adding the same one again changes nothing."""
        if number in self.variables:
            return
        data = value.to(dtype).reshape(tuple(shape)).clone()
        wants_grad = data.is_floating_point() or data.is_complex()
        self.variables[number] = StoredVariable(number, name, torch.nn.Parameter(data, requires_grad=wants_grad))

    def create_filled(
        self, number: int, name: str, shape: Sequence[int], dtype: torch.dtype, fill: Sequence[Any]
    ) -> None:
        """Adds a variable whose first values are made here: constant, normal or uniform.

        Raises:
            InvalidArgumentError: another kind of values.
        """
        if number in self.variables:
            return
        kind, first, second, seed = str(fill[0]), float(fill[1]), float(fill[2]), int(fill[3])
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        if kind not in ("constant", "normal", "uniform"):
            raise InvalidArgumentError(f"initializer {kind!r}: write 'constant', 'normal' or 'uniform'.")
        room = self.shared.table(number, math.prod(shape) * dtype.itemsize)
        data = _untouched_zeros(shape, dtype) if room is None else room[0].view(dtype).view(tuple(shape))
        if kind == "normal":
            data.normal_(first, second, generator=generator)
        elif kind == "uniform":
            data.uniform_(first, second, generator=generator)
        elif first != 0:
            data.fill_(first)
        stored = self.variables[number] = StoredVariable(number, name, torch.nn.Parameter(data), rows_only=True)
        if room is not None:
            stored.segment = room[1]
            stored.end_write()

    def variable(self, number: int) -> StoredVariable:
        """The variable of a number.

        Raises:
            NotFoundError: there is none.
        """
        found = self.variables.get(number)
        if found is None:
            raise NotFoundError(f"This parameter server has no variable {number}; it holds {len(self.variables)}.")
        return found

    # ---- checking ---------------------------------------------------------------------------------------------

    def check(self, header: Header, operations: Sequence[Operation]) -> None:
        """Checks a batch before any of its bytes are taken.

        Raises:
            InvalidArgumentError: sizes or dtypes do not fit the variables, or an unknown operation.
            NotFoundError: an unknown variable or optimizer.
            CancelledError: the closure was started anew elsewhere, or is finished.
        """
        self._admit(header, any(o.op in WRITES for o in operations))
        total = copied = largest = 0
        pulled: set[int] = set()
        for operation in operations:
            self._check_one(operation)
            total += request_bytes(operation)
            if operation.op == Op.PULL and operation.variable not in pulled:
                pulled.add(operation.variable)
            elif operation.op in (Op.PULL, Op.PULL_ROWS):
                size, one = _copied_bytes(self.variables[operation.variable].parameter, operation)
                copied, largest = copied + size, max(largest, one)
        if copied - largest > MOST_COPIED:
            raise InvalidArgumentError(
                f"An answer of {copied} bytes is too long: ask for at most {MOST_COPIED} bytes of rows in one message, "
                "and for each variable once."
            )
        if total != header.data_bytes:
            raise InvalidArgumentError(
                f"The operations need {total} bytes, but the header announces {header.data_bytes}."
            )

    def _check_one(self, operation: Operation) -> None:
        stored = self.variable(operation.variable)
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
        if operation.op in (Op.GRADIENT, Op.GRADIENT_ROWS) and operation.extra not in self.rules:
            raise NotFoundError(f"This parameter server has no optimizer {operation.extra}.")
        if operation.op in ROW_OPERATIONS:
            if parameter.dim() == 0:
                raise InvalidArgumentError(f"Variable {stored.name!r} is a scalar and has no rows.")
            needed = 0 if operation.op == Op.PULL_ROWS else operation.rows * _row_numel(parameter) * dtype.itemsize
            if operation.rows > 1 << 32:
                raise InvalidArgumentError(f"{operation.rows} rows in one message are too many.")
        else:
            needed = parameter.numel() * dtype.itemsize
        if operation.nbytes != needed:
            raise InvalidArgumentError(
                f"Variable {stored.name!r} of shape {tuple(parameter.shape)} needs {needed} bytes, but the message "
                f"carries {operation.nbytes}."
            )

    def _admit(self, header: Header, writes: bool) -> None:
        if header.low_water > self.low_water:
            self.low_water = header.low_water
            self._drop_finished()
        if header.closure == 0:
            return
        if self._is_finished(header.closure):
            raise CancelledError(f"Closure {header.closure} is finished; a late attempt changes nothing.")
        closure = self.closures.get(header.closure)
        if closure is None:
            if not writes:
                return
            closure = self.closures[header.closure] = ClosureWrites()
        if header.attempt < closure.attempt:
            raise CancelledError(
                f"Attempt {header.attempt} of closure {header.closure} was replaced by attempt {closure.attempt}."
            )
        closure.attempt = header.attempt

    def settle(self, low_water: int, below: int, unfinished: Sequence[int]) -> None:
        """Which functions are finished: their writes need not be known any more.

        Args:
            low_water: all with smaller numbers.
            below: all with smaller numbers but ``unfinished``.
            unfinished: ranges in order, as first, end, first, end, ...
        """
        self.low_water = max(self.low_water, low_water)
        self._below, self._starts, self._ends = below, list(unfinished[::2]), list(unfinished[1::2])
        self._drop_finished()

    def _is_finished(self, closure: int) -> bool:
        if closure < self.low_water or closure >= self._below:
            return closure < self.low_water
        place = bisect.bisect_right(self._starts, closure) - 1
        return place < 0 or closure >= self._ends[place]

    def _drop_finished(self) -> None:
        if len(self.closures) > 64:
            self.closures = {k: c for k, c in self.closures.items() if not self._is_finished(k)}

    def fence(self, closure: int, attempt: int) -> None:
        """Refuses every attempt of a closure before this one from now on."""
        if not self._is_finished(closure):
            entry = self.closures.setdefault(closure, ClosureWrites())
            entry.attempt = max(entry.attempt, attempt)

    # ---- executing --------------------------------------------------------------------------------------------

    def execute(self, header: Header, operations: Sequence[Operation], data: torch.Tensor) -> Answer:
        """Carries out a checked batch, in order.

        Args:
            header: of the message.
            operations: the batch.
            data: the bytes that came with it, one flat uint8 tensor.
        """
        steps: _Steps = {}
        try:
            if not torch.is_grad_enabled():
                return self._execute(header, operations, data, steps)
            with torch.no_grad():
                return self._execute(header, operations, data, steps)
        finally:
            _end(steps)

    def _execute(self, header: Header, operations: Sequence[Operation], data: torch.Tensor, steps: _Steps) -> Answer:
        answer, tensors = Answer([]), Tensors(data)
        writes = any(o.op in WRITES for o in operations)
        self._check_all_rows(operations, data)
        for operation in operations:
            stored = self.variable(operation.variable)
            parameter = stored.parameter
            rows = tensors.take(torch.int64, (operation.rows,)) if operation.op in ROW_OPERATIONS else None
            if operation.op in (Op.PULL, Op.PULL_ROWS):
                self._step(steps)
                self._pull(stored, operation, rows, answer, writes)
                continue
            shape = parameter.shape if rows is None else (operation.rows, *parameter.shape[1:])
            value = tensors.take(DTYPES[operation.dtype], shape)
            if value.dtype is not parameter.dtype:
                value = value.to(parameter.dtype)
            if self.is_duplicate(header, operation):
                answer.operations.append(reply(stored, extra=FLAG_DUPLICATE))
                continue
            if operation.op in (Op.GRADIENT, Op.GRADIENT_ROWS):
                grad, rate = value, self.rules[operation.extra].plain_rate(parameter)
                if rate is not None:
                    self._step(steps)
                    descend(stored, grad, rows, rate)
                    self.applied += 1
                    answer.operations.append(reply(stored))
                    continue
                if rows is not None:
                    grad = torch.sparse_coo_tensor(
                        rows[None], grad, parameter.shape, is_coalesced=_increase(rows), check_invariants=False
                    )
                stored.begin_write()
                steps.setdefault(operation.extra, []).append((grad, stored))
            else:
                self._step(steps)
                write(stored, operation.op, value, rows)
            self.applied += 1
            answer.operations.append(reply(stored))
        self._step(steps)
        return answer

    def _step(self, steps: _Steps) -> None:
        try:
            for number, pairs in steps.items():
                self.rules[number].apply([(grad, stored.parameter) for grad, stored in pairs])
        finally:
            _end(steps)

    def _check_all_rows(self, operations: Sequence[Operation], data: torch.Tensor) -> None:
        """Nothing of a batch is applied when one of its row numbers is wrong."""
        if not any(operation.op in ROW_OPERATIONS for operation in operations):
            return
        offset = 0
        for operation in operations:
            if operation.op in ROW_OPERATIONS:
                rows = tensor_view(data, offset, 8 * operation.rows, torch.int64)
                _check_rows(rows, self.variable(operation.variable))
            offset += request_bytes(operation)

    def _pull(
        self, stored: StoredVariable, operation: Operation, rows: torch.Tensor | None, answer: Answer, copy: bool
    ) -> None:
        dtype = DTYPES[operation.dtype]
        if not travels_as(operation.op, dtype, stored.parameter.dtype):
            dtype = stored.parameter.dtype
        if rows is not None:
            self._answer(answer, stored, stored.parameter.detach().index_select(0, rows).to(dtype))
        elif operation.argument == stored.version:
            answer.operations.append(reply(stored, extra=FLAG_UNCHANGED))
        else:
            own = dtype is stored.parameter.dtype and not copy  # the same batch may write it yet
            self._answer(answer, stored, stored.parameter.detach().to(dtype, copy=copy), stored if own else None)

    def _answer(
        self, answer: Answer, stored: StoredVariable, value: torch.Tensor, source: StoredVariable | None = None
    ) -> None:
        answer.operations.append(reply(stored, nbytes=value.numel() * value.element_size()))
        answer.tensors.append(value)
        answer.sources.append(source)

    def is_duplicate(self, header: Header, operation: Operation) -> bool:
        """Whether an earlier attempt of this closure has made this write; if not, notes that it is made now."""
        if header.closure == 0:
            return False
        writes = self.closures[header.closure].writes
        if operation.argument < writes.get(operation.variable, 0):
            self.duplicates += 1
            return True
        writes[operation.variable] = operation.argument + 1
        return False


def request_bytes(operation: Operation) -> int:
    """How many bytes follow a request for one of its operations."""
    if operation.op == Op.PULL:
        return 0
    return operation.stream_bytes


def _copied_bytes(parameter: torch.Tensor, operation: Operation) -> tuple[int, int]:
    """How many bytes are copied for an answer, and how many at least if it is to be given at all."""
    if operation.op == Op.PULL:
        return parameter.nbytes, parameter.nbytes
    one = _row_numel(parameter) * DTYPES[operation.dtype].itemsize
    return operation.rows * one, one


def reply(stored: StoredVariable, nbytes: int = 0, extra: int = 0) -> Operation:
    """The entry of an answer about one variable."""
    return Operation(0, dtype_number(stored.parameter.dtype), stored.number, stored.version, 0, nbytes, extra)


def _end(steps: _Steps) -> None:
    """The gradients are applied, or cannot be."""
    for pairs in steps.values():
        for _, stored in pairs:
            stored.end_write()
    steps.clear()


def _untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that cost no memory until they are written, page by page."""
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)[:nbytes].view(dtype).view(tuple(shape))


def _row_numel(parameter: torch.Tensor) -> int:
    return math.prod(parameter.shape[1:]) if parameter.shape[0] else 0


def _check_rows(rows: torch.Tensor, stored: StoredVariable) -> None:
    if rows.numel() == 0:
        return
    low, high = (int(number) for number in torch.aminmax(rows))
    if low < 0 or high >= stored.parameter.shape[0]:
        raise InvalidArgumentError(
            f"Row numbers {low}..{high} do not fit variable {stored.name!r} of {stored.parameter.shape[0]} rows."
        )


def _increase(rows: torch.Tensor) -> bool:
    """Whether each row number is larger than the one before: none is named twice."""
    return len(rows) < 2 or bool((rows[1:] > rows[:-1]).all())
