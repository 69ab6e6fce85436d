"""What an optimizer keeps for the variables of a server: told, given and taken. Runs in the servers' processes."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tfstyle_dist.parameter_server.server.table import VariableTable


def describe_slots(table: VariableTable, rule: int, numbers: Sequence[int]) -> dict[str, Any]:
    """The slots that an optimizer has for some variables of this server: shapes and dtypes, or values.

    Args:
        table: of the server.
        rule: number of the optimizer.
        numbers: of the variables.
    """
    slots: dict[str, Any] = {}
    if rule not in table.rules:
        return {"slots": {}, "settings": None}
    for number in numbers:
        found = table.rules[rule].slots(table.variable(number).parameter)
        slots[str(number)] = {
            name: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
            if isinstance(value, torch.Tensor)
            else {"value": value}
            for name, value in found.items()
        }
    return {"slots": slots, "settings": table.rule(rule).common()}


def give_bytes(table: VariableTable, rule: int, number: int, slot: str, start: int, count: int) -> dict[str, Any]:
    """Some bytes of a slot, as text.

    Args:
        table: of the server.
        rule: number of the optimizer.
        number: of the variable.
        slot: name of the slot, a tensor.
        start: the first byte.
        count: how many.
    """
    tensor = table.rules[rule].slots(table.variable(number).parameter)[slot]
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)[start : start + count]
    return {"bytes": base64.b64encode(data.numpy().tobytes()).decode("ascii")}


def take_slots(table: VariableTable, rule: int, entries: Sequence[tuple[int, Mapping[str, Any]]]) -> Iterator[Any]:
    """Takes all slots of some variables; what was there is gone. A job of one step.

    Args:
        table: of the server.
        rule: number of the optimizer.
        entries: numbers of the variables, and the slots of each.
    """
    for number, slots in entries:
        table.rules[rule].take_slots(table.variable(number).parameter, slots)
    table.calls += 1
    yield from ()
