"""A value that is on its way to a client stays as it was, whatever is written meanwhile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tfstyle_dist.parameter_server.lending import SMALLEST, OwnMemory
from tfstyle_dist.parameter_server.rules import LocalParameters, TorchRule
from tfstyle_dist.parameter_server.shared_values import SharedVariables
from tfstyle_dist.parameter_server.stored import StoredVariable, write
from tfstyle_dist.parameter_server.table import Answer, VariableTable
from tfstyle_dist.parameter_server.wire import Header, Kind, Op, Operation
from tfstyle_dist.shm import ordering, versioned_page

SIZE = SMALLEST // 4
STEPS = st.lists(st.sampled_from(["lend", "return first", "return last", "add", "rows", "assign"]), max_size=30)


@torch.no_grad()
def play(stored: StoredVariable, steps: list[str]) -> int:
    """Lends and writes in some order; the number of places in memory that the value was at."""
    value, lent, places = float(stored.parameter[0]), [], set()
    for number, step in enumerate(steps):
        if step == "lend":
            loan = stored.lend()
            if loan is not None:
                lent.append((loan, value))
        elif step.startswith("return"):
            if lent:
                lent.pop(0 if step == "return first" else -1)[0].give_back()
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
        assert all(loan.data.eq(then).all() for loan, then in lent)
    for loan, _ in lent:
        loan.give_back()
    return len(places)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_lent_value_does_not_change(steps: list[str]) -> None:
    play(StoredVariable(1, "v", torch.nn.Parameter(torch.zeros(SIZE))), steps)


@pytest.mark.skipif(not ordering.possible(), reason="values are shared on x86-64 alone")
@settings(max_examples=40, deadline=None)
@given(STEPS, st.sampled_from([0, 0, versioned_page.BUFFERS - 1, versioned_page.BUFFERS + 2]))
def test_a_lent_value_that_clients_of_this_host_can_read_does_not_change(steps: list[str], many: int) -> None:
    shared, stored = SharedVariables(), StoredVariable(1, "v", torch.nn.Parameter(torch.zeros(SIZE)))
    try:
        shared.describe({1: stored})
        assert stored.is_shared
        play(stored, ["lend", "add"] * many + steps)
    finally:
        shared.close()


def test_memory_is_used_again() -> None:
    stored = StoredVariable(1, "v", torch.nn.Parameter(torch.zeros(SIZE)))
    assert play(stored, ["lend", "add", "return first"] * 50) <= 3
    assert play(stored, ["add"] * 50) == 1


def test_a_small_variable_is_copied() -> None:
    stored = StoredVariable(1, "v", torch.nn.Parameter(torch.zeros(SIZE - 1)))
    assert stored.lend() is None
    assert stored.home is None


def test_a_lent_variable_can_still_be_shared() -> None:
    stored = StoredVariable(1, "v", torch.nn.Parameter(torch.zeros(SIZE)))
    loan = stored.lend()
    assert loan is not None
    assert isinstance(stored.home, OwnMemory)
    shared = SharedVariables()
    try:
        shared.describe({1: stored})
        assert stored.is_shared == ordering.possible()
        with torch.no_grad():
            write(stored, Op.ADD, torch.ones(SIZE), None)
        assert loan.data.eq(0).all()
        assert stored.parameter.eq(1).all()
        loan.give_back()
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
    loans = [table.variables[number].lend() for number in (1, 2)]
    begin, calls = OwnMemory.begin, []

    def second_fails(home: OwnMemory, stored: StoredVariable, keep: bool) -> torch.Tensor | None:
        calls.append(stored.number)
        if len(calls) == 2:
            raise MemoryError
        return begin(home, stored, keep)

    monkeypatch.setattr(OwnMemory, "begin", second_fails)
    with pytest.raises(MemoryError):
        batch_of(table, gradients, [torch.ones(SIZE)] * 2)
    monkeypatch.undo()
    loans.append(table.variables[1].lend())
    batch_of(table, gradients, [torch.ones(SIZE)] * 2)
    assert all(loan is not None and loan.data.eq(0).all() for loan in loans)
    assert all(table.variables[number].parameter.detach().lt(0).all() for number in (1, 2))
