"""Messages of parameter servers, their clients and coordinators."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st
from inputs import DEEP, altered, bounded, json_texts, nearly, values

from tfstyle_dist.coordinator import messages
from tfstyle_dist.core.errors import CancelledError, DataLossError, InvalidArgumentError, NotFoundError
from tfstyle_dist.elastic.connections.packets import PREFIX, Packet, decode, encode, room_for
from tfstyle_dist.parameter_server.protocol import byte_streams, pickling
from tfstyle_dist.parameter_server.protocol.header import (
    FLAG_INLINE,
    HEADER_SIZE,
    Header,
    Kind,
    ProtocolError,
    message_lengths,
    pack_message,
    pack_numbers,
    unpack_error,
    unpack_json,
    unpack_numbers,
)
from tfstyle_dist.parameter_server.protocol.operations import DTYPES, Op, Operation, pack_operations, unpack_operations
from tfstyle_dist.parameter_server.server.calls import ServerState
from tfstyle_dist.parameter_server.server.table import VariableTable
from tfstyle_dist.parameter_server.transports.client_session import ClientSession
from tfstyle_dist.parameter_server.transports.stream_socket import Frames

pytestmark = pytest.mark.timeout(120)

HEADER = pack_message(Header(Kind.BATCH, 7, 3, 2, 1, 5, 16, FLAG_INLINE), b"abcde")


@given(nearly(HEADER) | st.binary(max_size=80))
@bounded(50)
def test_headers(data: bytes) -> None:
    """A header that is taken is, packed again, what came."""
    try:
        header = Header.unpack(data)
    except ProtocolError:
        return
    assert pack_message(header, data[HEADER_SIZE:]) == data


WHOLE = [
    pack_message(Header(Kind.BATCH, 1, meta_bytes=3, data_bytes=4, flags=FLAG_INLINE), b"abc") + b"wxyz",
    pack_message(Header(Kind.ALIVE, 2), b""),
    pack_message(Header(Kind.CALL, 3, meta_bytes=2), b"{}"),
]


@given(nearly(b"".join(WHOLE)), st.lists(st.integers(1, 60), max_size=8))
@bounded(80)
def test_streams_of_messages(data: bytes, cuts: list[int]) -> None:
    """However the bytes arrive, the messages are theirs, in order, and none is lost or made up."""
    frames, taken, place = Frames(), b"", 0
    try:
        for size in [*cuts, len(data)]:
            frames.feed(data[place : place + size])
            place += size
            while (parts := frames.take()) is not None:
                taken += b"".join(parts)
    except ProtocolError:
        assert data.startswith(taken)
        return
    assert data.startswith(taken)
    rest = data[len(taken) :]
    announced = message_lengths(rest)
    assert announced is None or sum(announced) > len(rest)


@given(st.binary(max_size=200))
@bounded(60)
def test_tables_and_numbers(data: bytes) -> None:
    try:
        operations = unpack_operations(data)
    except ProtocolError:
        pass
    else:
        packed = pack_operations(operations)
        assert len(packed) == len(data)
        assert unpack_operations(packed) == operations
    try:
        assert pack_numbers(unpack_numbers(data)) == data
    except ProtocolError:
        assert len(data) % 8


@given(
    json_texts(st.dictionaries(st.sampled_from(["error", "message"]), values)).map(
        lambda t: t.encode("utf-8", "surrogatepass")
    )
    | st.binary()
)
@example(DEEP.encode())
@bounded(80)
def test_named_values_and_errors(data: bytes) -> None:
    """What a peer reports becomes an exception to raise, whatever it is."""
    try:
        assert isinstance(unpack_json(data), dict)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            unpack_error(data, "somebody")
        return
    assert isinstance(unpack_error(data, "somebody"), Exception)


@given(values | st.lists(st.integers(-3, 40), max_size=4), st.lists(st.binary(max_size=20), max_size=4))
@bounded(80)
def test_parts(sizes: Any, frames: list[bytes]) -> None:
    """Parts are put together from all the bytes there are, or the message is refused."""
    try:
        parts = byte_streams.join(sizes, frames)
    except ProtocolError:
        return
    assert [len(part) for part in parts] == sizes
    assert b"".join(parts) == b"".join(frames)


def table() -> VariableTable:
    """Two variables, and gradients for neither."""
    made = VariableTable()
    made.create(1, "a", [4, 3], torch.float32, torch.arange(12.0))
    made.create(2, "b", [], torch.int64, torch.tensor(5))
    return made


operations = st.builds(
    Operation,
    st.sampled_from([*Op, 0, 9, 255]), st.integers(0, len(DTYPES) - 1), st.sampled_from([1, 1, 2, 3, 1 << 40]),
    st.sampled_from([0, 1, 1 << 63]), st.sampled_from([0, 1, 2, 5, 1 << 33, (1 << 64) - 1]),
    st.sampled_from([0, 8, 24, 48, 1 << 60]), st.sampled_from([0, 1, 65535]),
)  # fmt: skip


@given(st.lists(operations, max_size=4), st.binary(max_size=256), st.integers(0, 3), st.integers(0, 3), st.booleans())
@bounded(120)
def test_batches(batch: list[Operation], data: bytes, closure: int, attempt: int, fits: bool) -> None:
    """A batch is carried out, or refused before any variable has changed."""
    server = table()
    before = {number: stored.parameter.detach().clone() for number, stored in server.variables.items()}
    total = sum(o.stream_bytes for o in batch if o.op != Op.PULL)
    size = total if fits and total <= 1 << 16 else len(data)
    raw = torch.frombuffer(
        bytearray((data * (size // (len(data) or 1) + 1) + bytes(size))[:size] or b"\0"), dtype=torch.uint8
    )[:size]
    header = Header(Kind.BATCH, 0, closure, 0, attempt, 0, size)
    try:
        server.check(header, batch)
        answer = server.execute(header, batch, raw)
    except (InvalidArgumentError, NotFoundError, CancelledError):
        assert all(torch.equal(stored.parameter, before[number]) for number, stored in server.variables.items())
        return
    assert len(answer.operations) == len(batch)


def never() -> None:
    """Nothing is sent."""


NEW = {"number": 9, "name": "c", "dtype": 0, "shape": [2, 2]}
CALLS: list[dict[str, Any]] = [
    {"method": "create", "variables": [NEW], "sizes": [16]},
    {"method": "create", "variables": [{**NEW, "shape": [2], "fill": ["normal", 0, 1, 3]}], "sizes": [0]},
    {"method": "hyperparameters", "number": 1, "groups": []},
    {"method": "outcome", "number": 1},
    {"method": "fence", "closure": 4, "attempt": 2},
    {"method": "segment", "name": "tfstyle-ps-0", "half": 64, "process": 1, "file": 3},
    {"method": "values"}, {"method": "leave"}, {"method": "statistics"},
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call['method']}{'-filled' if 'fill' in str(call) else ''}")
@given(st.data())
@bounded(50)
def test_calls(call: dict[str, Any], data: Any) -> None:
    """A call is answered, or refused in words of ours; a variable has all of the values that came, or is not made."""
    server = ServerState("/job:ps/task:0")
    server.table = table()
    client = ClientSession(b"x", None)
    client.role = "coordinator"
    meta = data.draw(altered(call).filter(lambda meta: isinstance(meta, dict)))
    frames = [bytes(range(16))] if call.get("sizes") == [16] else []
    try:
        server.call(client, meta, frames)
    except (InvalidArgumentError, NotFoundError, OSError):
        assert set(server.table.variables) == {1, 2}
    finally:
        server.stop_keeping(forget=False)
        server.table.shared.close()


PICKLED = bytes(pickling.dumps([1, {"a": (2.5, None)}])[0])


@given(st.integers(0, len(PICKLED) - 1))
@bounded(60)
def test_values_that_are_cut_off(size: int) -> None:
    """Pickles come from links with the cluster's key alone; half of one is not taken for a value."""
    with pytest.raises(DataLossError):
        pickling.loads([PICKLED[:size]])


@given(
    st.lists(st.integers(0, 1 << 64), max_size=5).map(lambda n: [min(x, (1 << 64) - 1) for x in n]),
    st.lists(st.binary(max_size=9), max_size=3),
)
@bounded(50)
def test_results(sizes: list[int], frames: list[bytes]) -> None:
    """The result of a function: its value, or an error of the protocol."""
    meta = struct.pack(f"<{len(sizes)}Q", *sizes)
    try:
        messages.value_of(byte_streams.join(unpack_numbers(meta), frames))
    except (ProtocolError, DataLossError):
        return


@given(
    json_texts(altered([{"is": "hello", "rank": 1}, [["float32", [2], [1]], ["meta int64", [3]]]])),
    st.binary(max_size=16),
)
@bounded(150)
def test_messages_of_elastic_jobs(header: str, body: bytes) -> None:
    try:
        packet = decode(header.encode(errors="surrogatepass"), bytearray(body))
    except DataLossError:
        return
    assert isinstance(packet.header, dict)


@given(nearly(bytes(encode(Packet({"is": "hello"}))[0])[: PREFIX.size]))
@bounded(80)
def test_lengths_of_messages_of_strangers(prefix: bytes) -> None:
    try:
        header, body = room_for(prefix[: PREFIX.size].ljust(PREFIX.size, b"\0"), stranger=True)
    except DataLossError:
        return
    assert len(header) <= 1 << 14
    assert not body
