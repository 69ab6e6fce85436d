"""The variables of one parameter server, and every change to them.

Here a pushed gradient becomes an update: ``execute`` has it made by the optimizer (``optimizer_rules``), or by
``descend`` of the variable for plain SGD. Large ones that wait at the same time are made in one pass by
``coalesced_writes``.

One thread at a time works on a table, so each operation is atomic. Writes made by scheduled functions are counted for
each function and variable: when a function is started again because its worker was lost, the writes that its earlier
attempt made are recognised by their number and are not applied twice.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.core.errors import InvalidArgumentError, NotFoundError
from tfstyle_dist.parameter_server.protocol.byte_streams import Tensors
from tfstyle_dist.parameter_server.protocol.header import Header
from tfstyle_dist.parameter_server.protocol.operations import (
    DTYPES,
    FLAG_DUPLICATE,
    FLAG_UNCHANGED,
    ROW_OPERATIONS,
    STEPS,
    WRITES,
    Answer,
    Op,
    Operation,
    dtype_number,
    travels_as,
)
from tfstyle_dist.parameter_server.server.batch_checks import check_rows, check_sizes
from tfstyle_dist.parameter_server.server.function_writes import FunctionWrites
from tfstyle_dist.parameter_server.server.shared_variables import SharedVariables
from tfstyle_dist.parameter_server.server.stored_variable import GradientRule, StoredVariable, descend, write
from tfstyle_dist.parameter_server.server.told_settings import ToldSettings

_Steps = dict[int, list[tuple[torch.Tensor, StoredVariable]]]
"""Gradients that optimizers are to apply together."""


class VariableTable:
    """The state of one parameter server."""

    def __init__(self) -> None:
        self.variables: dict[int, StoredVariable] = {}
        self.rules: dict[int, GradientRule] = {}
        self.told: dict[int, ToldSettings] = {}
        self.writes = FunctionWrites()
        self.applied = 0
        self.shared = SharedVariables()
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

    def rule(self, number: int, function: int = 0) -> GradientRule:
        """An optimizer, with the settings with which a function was scheduled; 0: with the newest."""
        rule, told = self.rules[number], self.told.get(number)
        if told is not None and (groups := told.switch(function)) is not None:
            rule.set_hyperparameters(groups)
        return rule

    def check(self, header: Header, operations: Sequence[Operation]) -> None:
        """Checks a batch before any of its bytes are taken.

        Raises:
            InvalidArgumentError: sizes or dtypes do not fit the variables, or an unknown operation.
            NotFoundError: an unknown variable or optimizer.
            CancelledError: the closure was started anew elsewhere, or is finished.
        """
        self.writes.admit(header, any(o.op in WRITES for o in operations))
        check_sizes(self, header, operations)

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
        check_rows(self, operations, data)
        for operation in operations:
            stored = self.variable(operation.variable)
            parameter = stored.parameter
            rows = tensors.take(torch.int64, (operation.rows,)) if operation.op in ROW_OPERATIONS else None
            if operation.op in (Op.PULL, Op.PULL_ROWS):
                self._step(steps)
                self._pull(stored, operation, rows, answer, writes)
                continue
            rest = () if operation.op == Op.ASSIGN_ELEMENTS else parameter.shape[1:]
            shape = parameter.shape if rows is None else (operation.rows, *rest)
            value = tensors.take(DTYPES[operation.dtype], shape)
            if value.dtype is not parameter.dtype:
                value = value.to(parameter.dtype)
            if self.writes.is_duplicate(header, operation):
                answer.operations.append(reply(stored, extra=FLAG_DUPLICATE))
                continue
            if operation.op in STEPS:
                grad, rate = value, self.rule(operation.extra, header.closure).plain_rate(parameter)
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
        before = torch.get_default_dtype()
        try:
            for number, pairs in steps.items():
                rule = self.rules[number]
                if rule.dtype is not torch.get_default_dtype():
                    torch.set_default_dtype(rule.dtype)
                rule.apply([(grad, stored.parameter) for grad, stored in pairs])
        finally:
            if before is not torch.get_default_dtype():
                torch.set_default_dtype(before)
            _end(steps)

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


def _increase(rows: torch.Tensor) -> bool:
    """Whether each row number is larger than the one before: none is named twice."""
    return len(rows) < 2 or bool((rows[1:] > rows[:-1]).all())
