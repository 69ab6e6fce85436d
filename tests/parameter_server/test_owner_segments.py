"""A value that is on its way to a client stays as it was, whatever is written meanwhile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tfstyle_dist.parameter_server.protocol.header import Header, Kind
from tfstyle_dist.parameter_server.protocol.operations import Answer, Op, Operation
from tfstyle_dist.parameter_server.server.optimizer_rules import LocalParameters, TorchRule
from tfstyle_dist.parameter_server.server.owner_segments import SMALLEST, PrivateSegment
from tfstyle_dist.parameter_server.server.shared_variables import SharedVariables
from tfstyle_dist.parameter_server.server.stored_variable import StoredVariable, write
from tfstyle_dist.parameter_server.server.table import VariableTable
from tfstyle_dist.shm import ordering, versioned_page

SIZE = SMALLEST // 4
STEPS = st.lists(st.sampled_from(["lease", "return first", "return last", "add", "rows", "assign"]), max_size=30)


@torch.no_grad()
def play(stored: StoredVariable, steps: list[str]) -> int:
    """Leases and writes in some order; the number of places in memory that the value was at."""
    value, leased, places = float(stored.parameter[0]), [], set()
    for number, step in enumerate(steps):
        if step == "lease":
            lease = stored.lease()
            if lease is not None:
                leased.append((lease, value))
        elif step.startswith("return"):
            if leased:
                leased.pop(0 if step == "return first" else -1)[0].release()
        elif step == "add":
            write(stored, Op.ADD, torch.ones(SIZE), None)
            value += 1
        elif step == "rows":
            write(stored, Op.ADD_ROWS, torch.ones(SIZE), torch.arange(SIZE))
            value += 1
        else:
            value = float(-number)
            write(stored, Op.ASSIGN, torch.full((SIZE,), value), None)
        places.add(stored.parameter.data_ptr())
        assert stored.parameter.eq(value).all()
        assert all(lease.data.eq(then).all() for lease, then in leased)
    for lease, _ in leased:
        lease.release()
    return len(places)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_leased_value_does_not_change(steps: list[str]) -> None:
    play(StoredVariable(1, "v", torch.nn.Parameter(torch.zeros(SIZE))), steps)


@pytest.mark.skipif(not ordering.possible(), reason="values are shared on x86-64 alone")
@settings(max_examples=40, deadline=None)
@given(STEPS, st.sampled_from([0, 0, versioned_page.BUFFERS - 1, versioned_page.BUFFERS + 2]))
def test_a_leased_value_that_clients_of_this_host_can_read_does_not_change(steps: list[str], many: int) -> None:
    shared, stored = SharedVariables(), StoredVariable(1, "v", torch.nn.Parameter(torch.zeros(SIZE)))
    try:
        shared.describe({1: stored})
        assert stored.is_shared
        play(stored, ["lease", "add"] * many + steps)
    finally:
        shared.close()


def test_memory_is_used_again() -> None:
    stored = StoredVariable(1, "v", torch.nn.Parameter(torch.zeros(SIZE)))
    assert play(stored, ["lease", "add", "return first"] * 50) <= 3
    assert play(stored, ["add"] * 50) == 1


def test_a_small_variable_is_copied() -> None:
    stored = StoredVariable(1, "v", torch.nn.Parameter(torch.zeros(SIZE - 1)))
    assert stored.lease() is None
    assert stored.segment is None


def test_a_leased_variable_can_still_be_shared() -> None:
    stored = StoredVariable(1, "v", torch.nn.Parameter(torch.zeros(SIZE)))
    lease = stored.lease()
    assert lease is not None
    assert isinstance(stored.segment, PrivateSegment)
    shared = SharedVariables()
    try:
        shared.describe({1: stored})
        assert stored.is_shared == ordering.possible()
        with torch.no_grad():
            write(stored, Op.ADD, torch.ones(SIZE), None)
        assert lease.data.eq(0).all()
        assert stored.parameter.eq(1).all()
        lease.release()
    finally:
        shared.close()


def batch_of(table: VariableTable, operations: list[Operation], values: list[torch.Tensor]) -> Answer:
    data = torch.cat([value.view(torch.uint8) for value in values])
    return table.execute(Header(Kind.BATCH, 1, data_bytes=data.numel()), operations, data)


def test_a_value_that_the_same_batch_changes_is_answered_as_it_was() -> None:
    table = VariableTable()
    table.create(1, "v", (SIZE,), torch.float32, torch.zeros(SIZE))
    answer = batch_of(table, [Operation(Op.PULL, 0, 1), Operation(Op.ADD, 0, 1, nbytes=4 * SIZE)], [torch.ones(SIZE)])
    assert answer.tensors[0].eq(0).all()
    assert answer.sources == [None]
    assert table.variables[1].parameter.detach().eq(1).all()


def test_a_write_that_finds_no_memory_does_not_spoil_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    table = VariableTable()
    for number in (1, 2):
        table.create(number, "v", (SIZE,), torch.float32, torch.zeros(SIZE))
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    adam.param_groups[0]["params"] = [LocalParameters([table.variables[n].parameter for n in (1, 2)])]
    table.rules[1] = TorchRule(adam)
    gradients = [Operation(Op.GRADIENT, 0, number, nbytes=4 * SIZE, extra=1) for number in (1, 2)]
    leases = [table.variables[number].lease() for number in (1, 2)]
    begin, calls = PrivateSegment.begin, []

    def second_fails(segment: PrivateSegment, stored: StoredVariable, keep: bool) -> torch.Tensor | None:
        calls.append(stored.number)
        if len(calls) == 2:
            raise MemoryError
        return begin(segment, stored, keep)

    monkeypatch.setattr(PrivateSegment, "begin", second_fails)
    with pytest.raises(MemoryError):
        batch_of(table, gradients, [torch.ones(SIZE)] * 2)
    monkeypatch.undo()
    leases.append(table.variables[1].lease())
    batch_of(table, gradients, [torch.ones(SIZE)] * 2)
    assert all(lease is not None and lease.data.eq(0).all() for lease in leases)
    assert all(table.variables[number].parameter.detach().lt(0).all() for number in (1, 2))
