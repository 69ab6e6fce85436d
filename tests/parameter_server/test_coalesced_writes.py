"""Writes that wait at the same time: one pass, and the bits of one after another."""

from __future__ import annotations

import copy
import sys
from typing import Any

import cloudpickle
import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.parameter_server.protocol.header import Header, Kind
from tfstyle_dist.parameter_server.protocol.operations import FLAG_DUPLICATE, Op, Operation, padded
from tfstyle_dist.parameter_server.server import coalesced_writes
from tfstyle_dist.parameter_server.server.coalesced_writes import Write, coalesce, coalescing_rate
from tfstyle_dist.parameter_server.server.optimizer_rules import TorchRule
from tfstyle_dist.parameter_server.server.table import VariableTable
from tfstyle_dist.parameter_server.transports.value_reader import ValueReader

pytestmark = pytest.mark.timeout(60)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SIZE = 3 * coalesced_writes.BLOCK + 7


def make_table(momentum: float = 0.0) -> VariableTable:
    table = VariableTable()
    generator = torch.Generator().manual_seed(1)
    table.create(1, "v", (SIZE,), torch.float32, torch.randn(SIZE, generator=generator))
    optimizer = torch.optim.SGD([table.variables[1].parameter], lr=0.3, momentum=momentum)
    rule = TorchRule.__new__(TorchRule)
    rule._optimizer, rule.parts, rule._rates = optimizer, [], None
    table.rules[9] = rule
    return table


def writes(ops: tuple[Op, ...]) -> list[Write]:
    made, generator = [], torch.Generator().manual_seed(2)
    for number, op in enumerate(ops, start=1):
        operation = Operation(op, 0, 1, 0, 0, 4 * SIZE, 9 if op == Op.GRADIENT else 0)
        data = torch.zeros(padded(4 * SIZE), dtype=torch.uint8)
        data[: 4 * SIZE] = torch.randn(SIZE, generator=generator).view(torch.uint8)
        made.append(Write(Header(Kind.BATCH, number, number, 1, 1, data_bytes=len(data)), operation, data))
    return made


@pytest.mark.parametrize("shared", [False, True])
def test_coalesced_writes_give_the_bits_of_one_after_another(shared: bool) -> None:
    ops = (Op.ADD, Op.GRADIENT, Op.SUB, Op.ADD, Op.GRADIENT)
    alone, joint = make_table(), make_table()
    held: Any = None
    if shared:
        reader = ValueReader(joint.shared.describe(joint.variables, joint.shared.join()))
        held = reader.lease(1)
        before = held[0].clone()
    for table in (alone, joint):
        for write in writes(ops):
            table.check(write.header, [write.operation])
    one_by_one = [alone.execute(w.header, [w.operation], w.data) for w in writes(ops)]
    at_once = coalesce(joint, writes(ops))
    assert torch.equal(alone.variables[1].parameter, joint.variables[1].parameter)
    assert [a.operations[0].argument for a in at_once] == [a.operations[0].argument for a in one_by_one]
    assert alone.variables[1].version == joint.variables[1].version == 6
    assert alone.applied == joint.applied == 5
    again = coalesce(joint, writes(ops)[:2])  # the same functions once more
    assert all(a.operations[0].extra & FLAG_DUPLICATE for a in again)
    assert torch.equal(alone.variables[1].parameter, joint.variables[1].parameter)
    if shared:
        assert torch.equal(held[0], before)
        assert reader.version(1) == 6
        joint.shared.close()


def test_what_looks_at_more_is_made_alone() -> None:
    table = make_table(momentum=0.9)
    (gradient,) = writes((Op.GRADIENT,))
    assert coalescing_rate(table, gradient.operation) is None
    assert coalescing_rate(make_table(), gradient.operation) == -0.3
    assign = copy.copy(gradient.operation)
    assign.op = Op.ASSIGN
    assert coalescing_rate(table, assign) is None


def test_many_workers_add_to_one_variable(cluster: Any) -> None:
    c = cluster(workers=3, ps=1)
    with c.strategy.scope():
        v = td.Variable(torch.zeros(SIZE))

    def add() -> None:
        for _ in range(5):
            v.assign_add(torch.ones(SIZE))

    for _ in range(60):
        c.coordinator.schedule(add)
    c.coordinator.join(timeout=50)
    assert v.value().eq(300).all()
    assert c.statistics()[0]["applied"] == 300
