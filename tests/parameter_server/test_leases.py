"""Values that a worker uses where the server keeps them: never torn, never lost, given back."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.parameter_server.protocol.header import Header, Kind
from tfstyle_dist.parameter_server.protocol.operations import Op, Operation, dtype_number, padded
from tfstyle_dist.parameter_server.server.table import VariableTable
from tfstyle_dist.parameter_server.transports.value_reader import ValueReader
from tfstyle_dist.shm import ordering, versioned_page

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(not ordering.possible(), reason="needs Linux on x86-64"),
]
SIZE = 100_000


def leased_table(clients: int = 1) -> tuple[VariableTable, list[ValueReader]]:
    table = VariableTable()
    table.create(1, "v", (SIZE,), torch.float32, torch.zeros(SIZE))
    columns = [table.shared.join() for _ in range(clients)]
    return table, [ValueReader(table.shared.describe(table.variables, column)) for column in columns]


def add(table: VariableTable, value: torch.Tensor) -> None:
    operation = Operation(Op.ADD, dtype_number(torch.float32), 1, 0, 0, 4 * SIZE)
    header = Header(Kind.BATCH, 1, data_bytes=padded(operation.nbytes))
    table.execute(header, [operation], value.view(torch.uint8))


def lease(reader: ValueReader) -> torch.Tensor:
    found = reader.lease(1)
    assert found is not None
    value = found[0].view(torch.float32)
    assert value.eq(found[1] - 1).all()  # each version adds one
    return value


def test_a_value_in_use_stays_as_it_is_while_the_server_goes_on() -> None:
    table, (reader, other) = leased_table(2)
    ones, held = torch.ones(SIZE), []
    for version in range(1, 9):
        held.append(lease(reader))
        add(table, ones)
        assert all(value.eq(place).all() for place, value in enumerate(held))
        assert float(table.variables[1].parameter.detach()[7]) == version
        assert lease(other).eq(version).all()
    other.sweep()
    assert table.shared.leases() == 8
    held.clear()
    gc.collect()
    reader.sweep()
    other.sweep()
    assert table.shared.leases() == 0
    before = table.variables[1].parameter.data_ptr()
    add(table, ones)
    assert table.variables[1].parameter.data_ptr() == before  # nobody uses it: written in place
    table.shared.close()


def test_what_is_written_into_a_value_is_seen_by_nobody_else() -> None:
    table, (reader, other) = leased_table(2)
    value = lease(reader)
    value[5000:] = -7
    view = value[:10]
    assert lease(other).eq(0).all()
    assert reader.copy(1, torch.empty(4 * SIZE, dtype=torch.uint8)) is None  # by message: not those pages
    del value
    reader.sweep()
    assert table.shared.leases() == 1  # the view uses it
    del view
    for _ in range(2 * versioned_page.BUFFERS):  # also when that buffer is used again
        add(table, torch.ones(SIZE))
        lease(reader)
    table.shared.close()


def test_what_an_ended_server_can_no_longer_show_is_asked_for() -> None:
    table, (reader, other) = leased_table(2)
    held = lease(reader)
    add(table, torch.ones(SIZE))  # into a buffer that no reader has mapped yet
    table.shared.close()
    rows = torch.empty(1, SIZE)
    assert reader.lease(1) is None
    assert reader.copy(1, torch.empty(4 * SIZE, dtype=torch.uint8)) is None
    assert reader.clone(1, torch.empty(SIZE)) is None
    assert not other.rows(1, torch.tensor([0]), rows)
    assert held.eq(0).all()


def test_when_all_buffers_are_in_use_values_are_copied() -> None:
    table, (reader,) = leased_table()
    held: list[Any] = []
    for _ in range(3 * versioned_page.BUFFERS):
        held.append(reader.lease(1))
        add(table, torch.ones(SIZE))
    assert sum(h is not None for h in held) == versioned_page.BUFFERS - 1
    target = torch.empty(4 * SIZE, dtype=torch.uint8)
    version = reader.copy(1, target)
    assert version is not None
    assert target.view(torch.float32).eq(version - 1).all()
    assert all(h[0].view(torch.float32).eq(h[1] - 1).all() for h in held if h is not None)
    held.clear()
    reader.sweep()
    add(table, torch.ones(SIZE))
    lease(reader)
    table.shared.close()


def test_values_are_never_torn() -> None:
    table, readers = leased_table(2)
    done, wrong = threading.Event(), []

    def read(reader: ValueReader) -> None:
        while not done.is_set():
            found = reader.lease(1)
            if found is not None:
                value = found[0].view(torch.float32)
                for _ in range(3):
                    if not value.eq(found[1] - 1).all():
                        wrong.append(found[1])

    threads = [threading.Thread(target=read, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    try:
        for _ in range(800):
            add(table, torch.ones(SIZE))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong
    table.shared.close()


def test_leases_of_a_killed_worker_are_given_back(cluster: Any, tmp_path: Path) -> None:
    c = cluster(workers=2, ps=1)
    with c.strategy.scope():
        v = td.Variable(torch.zeros(SIZE))
    marker = tmp_path / "at work"

    def hold() -> None:
        value = v.value()
        if not marker.exists():
            marker.write_text(str(td.coordinator.experimental_get_current_worker_index()))
            while bool(value.eq(value[0]).all()):
                time.sleep(0.01)

    def add_one() -> bool:
        value = v.value()
        v.assign_add(torch.ones(SIZE))
        return bool(value.eq(value[0]).all())

    holds = c.coordinator.schedule(hold)
    while not (marker.exists() and marker.read_text()):
        time.sleep(0.01)
    index = int(marker.read_text())
    assert all(c.coordinator.schedule(add_one, worker=1 - index).fetch() for _ in range(5))
    assert c.statistics()[0]["leases"] >= 1
    c.signal("worker", index, signal.SIGSTOP)
    c.kill("worker", index)
    assert holds.get(timeout=30) is None
    c.coordinator.join(timeout=30)
    c.kill("worker", 1 - index)
    deadline = time.monotonic() + 20
    while c.statistics()[0]["leases"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert c.statistics()[0]["leases"] == 0
    assert v.value().eq(5).all()


def test_a_copied_process_keeps_what_was_in_use() -> None:
    table, (reader,) = leased_table()
    value = lease(reader)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(int(value.numpy().any()))  # no threads of torch here
    del value
    reader.sweep()
    for _ in range(4):
        add(table, torch.ones(SIZE))
    os.write(write, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(read)
    os.close(write)
    table.shared.close()
