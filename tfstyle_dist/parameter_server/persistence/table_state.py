"""The state of a table in pieces, for snapshots and checkpoints: single variables, and what belongs to none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.parameter_server.protocol.header import Header
from tfstyle_dist.parameter_server.protocol.operations import Operation
from tfstyle_dist.parameter_server.server.function_writes import ClosureWrites
from tfstyle_dist.parameter_server.server.optimizer_rules import make_rule
from tfstyle_dist.parameter_server.server.stored_variable import StoredVariable
from tfstyle_dist.parameter_server.server.table import VariableTable
from tfstyle_dist.parameter_server.server.told_settings import ToldSettings


def copy_variable(table: VariableTable, number: int) -> dict[str, Any]:
    """All about one variable at this moment: value, version, optimizer slots, the writes of functions still at work."""
    stored = table.variables[number]
    writes = {
        closure: entry.writes[number]
        for closure, entry in table.writes.by_function.items()
        if closure >= table.writes.low_water and number in entry.writes
    }
    return {
        "number": number,
        "name": stored.name,
        "version": stored.version,
        "value": stored.parameter.detach().clone(),
        "requires_grad": stored.parameter.requires_grad,
        "slots": copy_slots(table, stored),
        "writes": writes,
    }


def copy_slots(table: VariableTable, stored: StoredVariable) -> dict[int, dict[str, Any]]:
    """The slots of a variable by number of the optimizer, their tensors copied."""
    found = {}
    for number, rule in table.rules.items():
        slots = rule.slots(stored.parameter)
        if slots:
            found[number] = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in slots.items()}
    return found


def put_variable(table: VariableTable, entry: dict[str, Any]) -> None:
    """Adds a variable from ``copy_variable``, without its slots."""
    number = int(entry["number"])
    parameter = torch.nn.Parameter(entry["value"], bool(entry["requires_grad"]))
    table.variables[number] = StoredVariable(number, str(entry["name"]), parameter, int(entry["version"]))
    for closure, count in entry["writes"].items():
        table.writes.by_function.setdefault(closure, ClosureWrites()).writes[number] = count


def put_slots(table: VariableTable, number: int, slots: dict[int, dict[str, Any]]) -> None:
    """Gives optimizers the slots of a variable."""
    for rule, values in slots.items():
        table.rules[rule].put_slots(table.variables[number].parameter, values)


def copy_rest(table: VariableTable) -> dict[str, Any]:
    """What belongs to no variable: optimizers without slots, and which attempt of a function counts."""
    return {
        "rules": {n: {"parts": rule.parts, "settings": table.rule(n).settings()} for n, rule in table.rules.items()},
        "told": {number: told.state() for number, told in table.told.items()},
        "low_water": table.writes.low_water,
        "attempts": {c: entry.attempt for c, entry in table.writes.by_function.items() if c >= table.writes.low_water},
    }


def put_rest(table: VariableTable, entry: dict[str, Any]) -> None:
    """Takes over ``copy_rest``; the variables must be there."""
    for number, rule in entry["rules"].items():
        add_rule(table, number, rule["parts"])
        table.rules[number].put_settings(rule["settings"])
    table.told.update({n: ToldSettings.of(state) for n, state in entry.get("told", {}).items()})
    table.writes.low_water = int(entry["low_water"])
    for closure, attempt in entry["attempts"].items():
        table.writes.by_function.setdefault(closure, ClosureWrites()).attempt = attempt


def clear(table: VariableTable) -> None:
    """Takes back what was put into a table that was empty, when the rest of it cannot be."""
    table.variables.clear()
    table.rules.clear()
    table.told.clear()
    table.writes.by_function.clear()
    table.writes.low_water = 0


def add_rule(table: VariableTable, number: int, parts: Sequence[Any]) -> None:
    """Makes an optimizer that was pickled; the same one again changes nothing."""
    if number in table.rules:
        return

    def local(numbers: Any) -> list[torch.nn.Parameter]:
        return [table.variables[n].parameter for n in numbers if n in table.variables]

    table.rules[number] = make_rule(parts, local)


def repeat_writes(table: VariableTable, header: Header, operations: Sequence[Operation], data: torch.Tensor) -> None:
    """Makes the writes of a journal once more."""
    if header.closure:
        entry = table.writes.by_function.setdefault(header.closure, ClosureWrites())
        entry.attempt = max(entry.attempt, header.attempt)
    table.execute(header, operations, data)
