"""Writes of several clients to one variable that wait at the same time: one pass over the variable makes them all.

The variable is cut into blocks that stay in the processor's cache; of each block the writes are made one after another,
in the order in which they came. So each element gets exactly what it gets when the writes are made one by one, and only
what can be seen in between is left out. This is done for ``assign_add``, ``assign_sub`` and for gradients of plain SGD;
other optimizers look at more than one element, or count their steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tfstyle_dist.parameter_server.protocol.header import Header
from tfstyle_dist.parameter_server.protocol.operations import FLAG_DUPLICATE, Answer, Op, Operation
from tfstyle_dist.parameter_server.server.table import VariableTable, reply

_SMALLEST = 1 << 16
BLOCK = 1 << 16
"""Elements."""


@dataclass(slots=True)
class Write:
    """A checked batch of one write.

    Attributes:
        header: of its message.
        operation: the write.
        data: its bytes.
    """

    header: Header
    operation: Operation
    data: torch.Tensor


def coalescing_rate(table: VariableTable, operation: Operation, function: int = 0) -> float | None:
    """By what the data of a function are multiplied before they are added; ``None``: the write must be made alone."""
    parameter = table.variable(operation.variable).parameter
    if parameter.numel() < _SMALLEST or operation.nbytes != parameter.nbytes:
        return None
    if operation.op in (Op.ADD, Op.SUB):
        return 1.0 if operation.op == Op.ADD else -1.0
    if operation.op == Op.GRADIENT:
        rate = table.rule(operation.extra, function).plain_rate(parameter)
        return None if rate is None else -rate
    return None


def coalesce(table: VariableTable, writes: Sequence[Write]) -> list[Answer]:
    """Makes writes to one variable for which ``coalescing_rate`` gave a number.

    Args:
        table: of the server.
        writes: in the order in which they came.

    Returns:
        The answer to each; the versions are those of one write after another.
    """
    stored = table.variable(writes[0].operation.variable)
    answers: list[Answer] = []
    data: list[tuple[torch.Tensor, int, float]] = []
    old: torch.Tensor | None = None
    for write in writes:
        if table.writes.is_duplicate(write.header, write.operation):
            answers.append(Answer([reply(stored, extra=FLAG_DUPLICATE)]))
            continue
        if not data:
            old = stored.begin_write(keep=False)
        else:
            stored.begin_write()
        values = write.data[: write.operation.nbytes].view(stored.parameter.dtype)
        rate = coalescing_rate(table, write.operation, write.header.closure)
        data.append((values, write.operation.op, rate or 0.0))
        table.applied += 1
        answers.append(Answer([reply(stored)]))
    if data:
        target = stored.parameter.detach().view(-1)
        source = target if old is None else old.view(-1)
        try:
            for start in range(0, len(target), BLOCK):
                block, last = target[start : start + BLOCK], source[start : start + BLOCK]
                for values, op, rate in data:
                    _one(op, last, values[start : start + BLOCK], rate, block)
                    last = block
        finally:
            stored.end_write()
    return answers


def _one(op: int, last: torch.Tensor, values: torch.Tensor, rate: float, out: torch.Tensor) -> None:
    """The same operation as for a write that is made alone."""
    if op == Op.ADD:
        torch.add(last, values, out=out)
    elif op == Op.SUB:
        torch.sub(last, values, out=out)
    else:
        torch.add(last, values, alpha=rate, out=out)
