"""Pulls without a message, writes that go together, and streams of bytes in pieces."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.parameter_server.protocol import byte_streams
from tfstyle_dist.parameter_server.protocol.header import CHUNK, Header, Kind, ProtocolError
from tfstyle_dist.parameter_server.protocol.operations import Op, Operation, dtype_number, padded
from tfstyle_dist.parameter_server.server.shared_variables import SharedVariables
from tfstyle_dist.parameter_server.server.stored_variable import write
from tfstyle_dist.parameter_server.server.table import VariableTable
from tfstyle_dist.parameter_server.transports.transfer_segment import TransferSegment
from tfstyle_dist.parameter_server.transports.value_reader import ValueReader
from tfstyle_dist.shm import ordering

needs_x86 = pytest.mark.skipif(not ordering.possible(), reason="needs Linux on x86-64")


def shared_table(size: int) -> tuple[VariableTable, ValueReader]:
    table = VariableTable()
    table.create(1, "v", (size,), torch.float32, torch.zeros(size))
    table.create(2, "scalar", (), torch.int64, torch.tensor(7))
    table.create(4, "empty", (0, 3), torch.float32, torch.empty(0, 3))
    table.create_filled(3, "rows", (10, 2), torch.float32, ("constant", 1.5, 0.0, 0))
    return table, ValueReader(table.shared.describe(table.variables))


def add(table: VariableTable, value: torch.Tensor) -> None:
    operation = Operation(Op.ADD, dtype_number(torch.float32), 1, 0, 0, 4 * value.numel())
    header = Header(Kind.BATCH, 1, data_bytes=padded(operation.nbytes))
    data = torch.zeros(header.data_bytes, dtype=torch.uint8)
    data[: operation.nbytes] = value.view(torch.uint8)
    table.execute(header, [operation], data)


@needs_x86
def test_a_reader_sees_each_version_once_it_is_whole() -> None:
    table, reader = shared_table(1000)
    picked = torch.zeros(3, 2)
    assert reader.rows(3, torch.tensor([9, 0, 9]), picked)
    assert picked.eq(1.5).all()
    assert not reader.rows(3, torch.tensor([10]), picked[:1])  # the server says what is wrong
    seven = torch.zeros(8, dtype=torch.uint8)
    assert reader.copy(2, seven) == 1
    assert int(seven.view(torch.int64)) == 7
    empty = reader.clone(4, torch.empty(0, 3))
    assert empty is not None
    assert empty[0].shape == (0, 3)
    target = torch.zeros(4000, dtype=torch.uint8)
    add(table, torch.ones(1000))
    assert (reader.version(1), reader.copy(1, target)) == (2, 2)
    assert target.view(torch.float32).eq(1).all()
    stored = table.variables[1]
    stored.begin_write()
    assert reader.copy(1, target) is None
    assert reader.clone(1, torch.empty(1000)) is None
    stored.end_write()
    assert reader.copy(1, target) == 3
    made = reader.clone(1, torch.empty(1000))
    assert made is not None
    made[0].zero_()  # memory of its own
    again = reader.clone(1, torch.empty(1000))
    assert again is not None
    assert again[0].eq(1).all()
    assert again[1] == 3
    table.shared.close()


@needs_x86
def test_a_copy_is_never_of_two_versions() -> None:
    size = 200_000
    table, reader = shared_table(size)
    done = threading.Event()

    def write() -> None:
        while not done.wait(0.0002):
            add(table, torch.ones(size))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        target, whole = torch.zeros(4 * size, dtype=torch.uint8), 0
        while whole < 50:
            version = reader.copy(1, target)
            if version is not None:
                whole += 1
                assert target.view(torch.float32).eq(version - 1).all()
    finally:
        done.set()
        thread.join()
    table.shared.close()


@needs_x86
def test_only_files_of_a_server_are_mapped(tmp_path: Any) -> None:
    table, _ = shared_table(10)
    other, _ = shared_table(10)
    told, told_by_another = table.shared.describe(table.variables), other.shared.describe(other.variables)
    with open(tmp_path / "other", "wb+") as file:
        file.truncate(4096)
        with pytest.raises(PermissionError, match="is not the memory"):
            ValueReader({**told, "files": [file.fileno()], "bytes": [4096]})
    with pytest.raises(PermissionError, match="is not the memory"):  # the numbers are right in another process too
        ValueReader({**told, "owner": told_by_another["owner"]})
    with pytest.raises(PermissionError, match="is smaller than"):
        ValueReader({**told, "bytes": [1 << 40] * len(told["files"])})
    table.shared.close()
    other.shared.close()
    assert SharedVariables().describe({})["variables"] == []


@needs_x86
def test_small_variables_that_are_made_one_after_another_share_a_file() -> None:
    """Each file takes descriptors of the server and of every client; a process may have 1,024."""
    table, reader, sizes = VariableTable(), None, [5, 3000, 40_000]
    for number in range(300):
        size = sizes[number % 3]
        table.create(number, "v", (size,), torch.float32, torch.full((size,), float(number)))
        told = table.shared.describe(table.variables)
        reader = ValueReader(told) if reader is None else reader
        reader.update(told)
    assert reader is not None
    assert len(told["files"]) < 25  # with 17 MB in them
    write(table.variables[3], Op.ADD, torch.ones(5), None)
    for number in range(300):
        target = torch.empty(sizes[number % 3])
        assert reader.copy(number, target) is not None
        assert target.eq(number + (number == 3)).all()
    table.shared.close()


def test_only_the_segment_that_was_announced_is_mapped_and_no_file_is_left_open() -> None:
    mine, other = TransferSegment.create(4096), TransferSegment.create(4096)
    both = TransferSegment.attach(mine.location)
    mine.request(8).fill_(7)
    assert both.request(8).tolist() == [7] * 8
    both.close()
    before = len(os.listdir("/proc/self/fd"))
    wrong = [
        {"file": other.location["file"]},
        {"name": other.location["name"]},
        {"name": "other"},
        {"process": 1},
        {"file": 0},
        {"half": 4097},
        {"half": 1 << 80},
        {"half": -1},
    ]
    for change in wrong:
        with pytest.raises((OSError, ProtocolError)):
            TransferSegment.attach({**mine.location, **change})
    assert len(os.listdir("/proc/self/fd")) == before
    mine.close()
    other.close()


@pytest.mark.parametrize("sizes", [(5,), (100_000,), (3, 1_000_000, 7), (262_144, 1, 262_144), (70_001, 70_001)])
def test_streams_bring_tensors_whole(sizes: tuple[int, ...]) -> None:
    tensors = [torch.arange(n, dtype=torch.int32).to(torch.uint8) for n in sizes]
    targets = [torch.zeros_like(t) for t in tensors]
    filler = byte_streams.Filler(targets)
    total = 0
    for piece in byte_streams.stream(tensors):
        assert len(piece) <= CHUNK
        filler.take(piece)
        total += len(piece)
    assert total == filler.total
    assert all(torch.equal(a, b) for a, b in zip(tensors, targets, strict=True))
    with pytest.raises(ProtocolError, match="1 bytes too many"):
        filler.take(memoryview(b"x"))


def test_a_message_is_taken_apart_into_its_tensors() -> None:
    tensors = [
        torch.arange(5), torch.randn(5, 3), torch.tensor(2.5, dtype=torch.float64), torch.zeros(0, 4),
        torch.randn(2, 3, 4), torch.tensor([True, False, True]), torch.randn(7).bfloat16(), torch.arange(3),
    ]  # fmt: skip
    pieces = byte_streams.views([tensor for tensor in tensors if tensor.numel()])
    data = torch.cat([torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces])
    later = torch.cat([torch.zeros(32, dtype=torch.uint8), data])[32:]  # not at the storage's start
    taken = byte_streams.Tensors(later)
    for tensor in tensors:
        found = taken.take(tensor.dtype, tensor.shape)
        assert found.is_contiguous()
        torch.testing.assert_close(found, tensor, rtol=0, atol=0)


@pytest.mark.parametrize("shared", ["1", "0"])
def test_many_writes_of_a_function_go_together(cluster: Any, monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", shared)
    c = cluster(workers=2, ps=2, env={"TFSTYLE_SHARED_MEMORY": shared})
    with c.strategy.scope():
        small = [td.Variable(torch.zeros(100)) for _ in range(60)]
        large = td.Variable(torch.zeros(400_000))

    def write() -> float:
        for v in small:
            v.assign_add(torch.ones(100))
        large.assign_add(torch.ones(400_000))
        small[0].assign_add(torch.ones(100))
        return float(small[0].value()[0])  # reading brings the writes out

    seen = [c.coordinator.schedule(write) for _ in range(20)]
    c.coordinator.join(timeout=60)
    assert all(float(v.value().sum()) == 2000 * (2 if v is small[0] else 1) for v in small)
    assert float(large.value().sum()) == 20 * 400_000
    assert all(s.fetch() >= 2 for s in seen)
    statistics = c.coordinator.statistics()
    assert (statistics.waiting, statistics.running, statistics.finished) == (0, 0, 20)
    assert 0 <= statistics.staleness <= 20


@pytest.mark.timeout(60)
def test_without_a_segment_tensors_go_another_way(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        v = td.Variable(torch.zeros(1 << 18))

    def add(fails: bool) -> float:
        def refuse(half: int) -> None:
            raise OSError(f"no memory for 2 x {half} bytes")

        if fails:
            TransferSegment.create = refuse  # type: ignore[assignment, method-assign]
        v.assign_add(torch.ones(1 << 18))
        return float(v.value().sum())

    for number in range(1, 6):
        result = c.coordinator.schedule(add, args=(number == 1,))
        assert result.get(timeout=20) == number * (1 << 18)
    assert c.output().count("tensors travel by ZeroMQ") == 1
