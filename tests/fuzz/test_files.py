"""Files that others may have touched: checkpoints, snapshots and journals of parameter servers, keys."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st
from inputs import DEEP, altered, bounded, json_texts, nearly, values

from tfstyle_dist.checkpoint import codec, files
from tfstyle_dist.checkpoint.reader import CheckpointReader
from tfstyle_dist.core.errors import DataLossError, InvalidArgumentError
from tfstyle_dist.monitoring import saved
from tfstyle_dist.parameter_server.persistence.record_files import RecordFile, read_records, read_what_is_whole
from tfstyle_dist.parameter_server.persistence.snapshots import SnapshotKeeper
from tfstyle_dist.parameter_server.protocol.header import Header, Kind
from tfstyle_dist.parameter_server.protocol.key_pair import Keys
from tfstyle_dist.parameter_server.protocol.operations import Op, Operation, pack_operations
from tfstyle_dist.parameter_server.server.calls import ServerState
from tfstyle_dist.train import Checkpoint, CheckpointManager, get_checkpoint_state

pytestmark = pytest.mark.timeout(120)
KEYS = {"public": "a" * 40, "secret": "b" * 40}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@given(json_texts(altered(KEYS)).map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=40))
@example(DEEP.encode())
@example(json.dumps(KEYS).encode())
@example(json.dumps({**KEYS, "secret": "short"}).encode())
@bounded(80)
def test_key_files(folder: Path, data: bytes) -> None:
    path = folder / "key"
    path.write_bytes(data)
    path.chmod(0o600)
    refused = None
    try:
        keys = Keys.load(path)
    except ValueError as error:
        refused = str(error)
    if refused is not None:
        assert "no key file" in refused
        return
    assert json.loads(data)["public"].encode() == keys.public
    assert len(keys.secret) == 40


RECORDS = [[b"call", b"{}"], [b"a" * 40, b"", b"b"], [bytes(range(60))]]


@pytest.fixture(scope="module")
def records(folder: Path) -> bytes:
    path = folder / "whole"
    file = RecordFile(path)
    for parts in RECORDS:
        file.write(parts)
    file.close()
    return path.read_bytes()


@given(st.data())
@bounded(120)
def test_records(folder: Path, records: bytes, data: Any) -> None:
    """What is read was written, in order; a reader of complete files misses nothing without a word."""
    path = folder / "touched"
    path.write_bytes(data.draw(nearly(records) | st.binary(max_size=60)))
    path.chmod(0o600)
    rest = iter(RECORDS)
    whole = list(read_what_is_whole(path))
    assert all(parts in rest for parts in whole)
    try:
        assert list(read_records(path)) == whole
    except DataLossError:
        return


SESSION = "ab12"
PARTS = st.lists(st.binary(max_size=40) | st.sampled_from([b"call", b"batch", b"{}", DEEP.encode()]), max_size=4)
BATCH = Header(Kind.BATCH, 0).pack()
WRITE = pack_operations([Operation(Op.ADD, 0, 1, 5 << 24, 0, 16)])


@given(
    st.lists(
        PARTS | st.sampled_from([[b"batch", BATCH, WRITE, bytes(8)], [b"call", b'{"method":"create"}']]), max_size=4
    )
)
@bounded(60)
def test_journals_and_snapshots(records: list[list[bytes]]) -> None:
    """A server starts with what it understands; what it does not is said, and is not half in its table."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "ps-0"
        place.mkdir(mode=0o700)
        for kind in ("0.journal", "1.snapshot"):
            file = RecordFile(place / f"{SESSION}-{kind}")
            for parts in records:
                file.write(parts)
            file.close()
        server = ServerState("/job:ps/task:0")
        options = {"folder": name, "seconds": 60, "every_write": True}
        keeper = SnapshotKeeper(options, 0, SESSION, server.table, server.jobs)
        keeper.restore(server.change)
        server.jobs.close()
        keeper.close(forget=False)
        assert not server.table.variables
        server.table.shared.close()


class Saved:
    """A model and its optimizer, and a checkpoint of both."""

    def __init__(self, folder: Path) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.checkpoint = Checkpoint(model=self.model, optimizer=self.optimizer, step=torch.tensor(3))
        self.path = str(self.checkpoint.write(str(folder / "one" / "ckpt-1")))
        self.index = files.index_file(self.path).read_bytes()
        self.content = json.loads(self.index)["content"]


@pytest.fixture(scope="module")
def written(folder: Path) -> Saved:
    return Saved(folder)


@given(st.data())
@bounded(80)
def test_index_files(written: Saved, data: Any) -> None:
    """Bytes that something changed: read as they were written, or not at all."""
    files.index_file(written.path).write_bytes(data.draw(nearly(written.index)))
    try:
        content = files.read_index(written.path)
    except DataLossError:
        return
    finally:
        files.index_file(written.path).write_bytes(written.index)
    assert content == written.content


@given(st.data())
@bounded(120)
def test_index_files_of_somebody_else(written: Saved, data: Any) -> None:
    """A right checksum over anything: the objects are restored, or none of them is changed."""
    text = data.draw(altered(written.content).map(json.dumps) | json_texts())
    body = text.encode("utf-8", "surrogatepass")
    with torch.no_grad():
        written.model.weight.fill_(7)
    before = json.dumps(codec.encode(written.optimizer.state_dict(), "", lambda path, tensor: str(tensor.tolist())))
    files.index_file(written.path).write_bytes(b'{"crc32": %d, "content":\n%s}\n' % (zlib.crc32(body), body))
    try:
        reader = CheckpointReader(written.path)
        reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        written.checkpoint.restore(written.path)
    except (DataLossError, InvalidArgumentError):
        assert written.model.weight.eq(7).all()
        after = codec.encode(written.optimizer.state_dict(), "", lambda path, tensor: str(tensor.tolist()))
        assert json.dumps(after) == before
    finally:
        files.index_file(written.path).write_bytes(written.index)
        written.checkpoint.restore(written.path)


STATE = b'model_checkpoint_path: "ckpt-1"\nall_model_checkpoint_paths: "ckpt-1"\nall_model_checkpoint_timestamps: 1.5\n'


@given(nearly(STATE) | json_texts().map(lambda text: f"model_checkpoint_path: {text}".encode("utf-8", "surrogatepass")))
@example(b"model_checkpoint_path: 1")
@example(b'model_checkpoint_path: "a\\u0000b"')
@example(b"\xff\xfe")
@example(STATE.replace(b"1.5", b'"soon"'))
@example(STATE + b"all_model_checkpoint_timestamps: 2.5\n")
@bounded(120)
def test_state_files(folder: Path, data: bytes) -> None:
    """The list of checkpoints of a folder, and the manager that goes on with it."""
    place = folder / "state"
    place.mkdir(exist_ok=True)
    (place / "checkpoint").write_bytes(data)
    try:
        state = get_checkpoint_state(str(place))
        CheckpointManager(Checkpoint(step=torch.tensor(1)), str(place), max_to_keep=2)
    except DataLossError:
        return
    assert state is None or os.path.dirname(state.model_checkpoint_path)


TREE = {
    "a": [{"$tensor": "t"}, {"$tuple": [1, None]}, {"$ordered": [["k", 1], [{"$tuple": [1]}, 2]]}],
    "b": {"$bytes": "YWI="}, "c": {"$complex": [1.0, 2.0]}, "d": {"$dtype": "float32"}, "e": {"$device": "cpu"},
    "f": {"$set": [1, "x"]}, "g": {"$counter": [["x", 2]]}, "h": {"$ndarray": "t"},
}  # fmt: skip


@given(altered(TREE) | values)
@example({"$dtype": "ops"})
@example({"$device": "meta:-3"})
@example({"$set": [[1]]})
@example({"$dict": "ab"})
@example({"$unknown": 1})
@bounded(200)
def test_values_in_an_index(tree: Any) -> None:
    """What was checked can be decoded, and gives the same when it is written again."""
    try:
        codec.check(tree, {"t"})
    except ValueError:
        return
    value = codec.decode(tree, {"t": torch.zeros(1)}.__getitem__)
    again = codec.encode(value, "", lambda path, tensor: "t")
    assert codec.tensor_names(again) == codec.tensor_names(tree)


REPORT = {
    "format": "tfstyle_dist report", "function": "f", "steps": 1, "calls": 2, "step_seconds": 0.1,
    "median_seconds": 0.1, "high_seconds": 0.1, "first_seconds": 1,
    "others": [["g", 1, 0.5]], "recent": [[0.1, [0.1] * 6]],
    "replicas": [{"replica": 0, "worker": 0, "device": "cpu", "seconds": [0.1] * 6, "overlapped": 0}],
}  # fmt: skip


@given(json_texts(altered(REPORT) | st.just(REPORT)).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(DEEP.encode())
@bounded(80)
def test_saved_reports(folder: Path, data: bytes) -> None:
    """What is taken for a report can be shown."""
    path = folder / "report"
    path.write_bytes(data)
    try:
        report = saved.load(path)
    except DataLossError:
        return
    assert str(report)
