"""Bytes that no well-behaved client sends, and clients that are nobody's."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from until import wait_until

import tfstyle_dist as td
from tfstyle_dist.core import strangers
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.parameter_server.client.server_link import ServerLink
from tfstyle_dist.parameter_server.protocol import zeromq_sockets
from tfstyle_dist.parameter_server.protocol.handshake import Tokens
from tfstyle_dist.parameter_server.protocol.header import (
    FLAG_INLINE,
    HEADER_SIZE,
    Header,
    Kind,
    pack_json,
    pack_message,
    unpack_json,
)
from tfstyle_dist.parameter_server.protocol.operations import Op, Operation, pack_operations
from tfstyle_dist.parameter_server.transports import unix_listener

pytestmark = pytest.mark.timeout(90)


class Raw:
    """A client that says what it likes."""

    def __init__(self, address: str) -> None:
        self.context = zeromq_sockets.Context(None)
        self.socket, self.monitor = self.context.connect(address, b"c" + random.randbytes(8))
        self.poller = zeromq_sockets.poller(self.socket)

    def send(self, *parts: bytes) -> None:
        self.socket.send_multipart(list(parts))

    def answer(self, timeout: float = 20.0) -> tuple[Kind, dict[str, Any]]:
        assert self.poller.poll(timeout * 1000), "no answer"
        message = self.socket.recv_multipart()[0]
        header = Header.unpack(message)
        return header.kind, unpack_json(message[HEADER_SIZE:]) if header.meta_bytes else {}

    def introduce(self, session: str, role: str = "worker") -> tuple[Kind, dict[str, Any]]:
        meta = pack_json({"role": role, "task": "test", "session": session})
        self.send(pack_message(Header(Kind.HANDSHAKE, 0, meta_bytes=len(meta)), meta))
        return self.answer()

    def handshake(self, session: str) -> None:
        assert self.introduce(session)[0] is Kind.OK

    def batch(self, operations: list[Operation], data: bytes, announced: int | None = None, flags: int = 0) -> None:
        meta = pack_operations(operations)
        size = len(data) if announced is None else announced
        head = pack_message(Header(Kind.BATCH, 1, meta_bytes=len(meta), data_bytes=size, flags=flags), meta)
        self.send(*([head, data] if flags else [head]))

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)
        self.context.close()


def test_headers_are_checked_before_buffers_are_taken(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        small = td.Variable([1.0, 2.0])
        whole = td.Variable([1, 2], dtype=torch.int64)
    number, other = (v._tfstyle_record.shards[0].number for v in (small, whole))
    cases = {
        "too many bytes": ([Operation(Op.ASSIGN, 0, number, 0, 0, 1 << 50)], 1 << 50, "needs 8 bytes"),
        "wrong dtype": ([Operation(Op.ASSIGN, 0, other, 0, 0, 8)], 16, "dtype"),
        "no such variable": ([Operation(Op.ADD, 0, 9999, 0, 0, 8)], 16, "no variable 9999"),
        "unknown operation": ([Operation(200, 0, number, 0, 0, 8)], 16, "Unknown operation"),
        "another sum": ([Operation(Op.ADD, 0, number, 0, 0, 8)], 1 << 40, "announces"),
        "no such optimizer": ([Operation(Op.GRADIENT, 0, number, 0, 0, 8, 77)], 16, "no optimizer 77"),
        "very many rows": ([Operation(Op.PULL_ROWS, 0, number, 0, 1 << 60)], 1 << 63, "too many"),
        "elements of a wrong size": ([Operation(Op.ASSIGN_ELEMENTS, 0, number, 0, 2, 4)], 32, "needs 8 bytes"),
        "rows of a wrong size": ([Operation(Op.ADD_ROWS, 0, number, 0, 2, 4)], 32, "needs 8 bytes"),
    }
    for name, (operations, announced, message) in cases.items():
        raw = Raw(c.spec["ps"][0])
        raw.handshake(c.strategy.session)
        raw.batch(operations, b"", announced)
        kind, answer = raw.answer()
        assert kind is Kind.ERROR, name
        assert message in answer["message"], (name, answer)
        raw.close()
    raw = Raw(c.spec["ps"][0])
    raw.handshake(c.strategy.session)
    rows = struct.pack("<2q", 0, 7) + struct.pack("<2f", 1.0, 1.0) + bytes(8)
    raw.batch([Operation(Op.ADD_ROWS, 0, number, 0, 2, 8)], rows, flags=FLAG_INLINE)
    assert "Row numbers 0..7" in raw.answer()[1]["message"]
    raw.batch([Operation(Op.ASSIGN_ELEMENTS, 0, number, 0, 2, 8)], rows, flags=FLAG_INLINE)
    assert "Numbers of elements 0..7" in raw.answer()[1]["message"]
    raw.batch([Operation(Op.PULL, 0, number)], b"", 0, flags=0)
    assert Header.unpack(raw.socket.recv_multipart()[0]).kind is Kind.OK
    meta = pack_json({"method": "optimizer", "number": 1, "sizes": []})
    raw.send(pack_message(Header(Kind.CALL, 2, meta_bytes=len(meta)), meta))
    assert "Only the coordinator" in raw.answer()[1]["message"]
    raw.close()
    assert small.value().tolist() == [1.0, 2.0]


@pytest.fixture
def admitted(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], Any]]:
    """Asks a server for its Unix socket, or its port for tensors: the name or the port."""
    raws: list[Raw] = []

    def ask(tcp: bool) -> Any:
        c = cluster(workers=1, ps=1)
        raws.append(Raw(c.spec["ps"][0]))
        raws[-1].handshake(c.strategy.session)
        meta = pack_json({"method": "listen", "transport": "tcp" if tcp else "shared memory"})
        raws[-1].send(pack_message(Header(Kind.CALL, 1, meta_bytes=len(meta)), meta))
        kind, told = raws[-1].answer()
        assert kind is Kind.OK
        return told["port"] if tcp else told["name"]

    yield ask
    for raw in raws:
        raw.close()


@pytest.mark.parametrize("tcp", [False, True])
def test_a_stranger_is_listened_to_for_a_tokens_length(admitted: Any, tcp: bool) -> None:
    place = admitted(tcp)
    with socket.create_connection(("127.0.0.1", place)) if tcp else socket.socket(socket.AF_UNIX) as stranger:
        if not tcp:
            stranger.connect("\0" + place)
        stranger.settimeout(5)  # less than the time that a token may take
        with contextlib.suppress(ConnectionError):
            stranger.sendall(Header(Kind.HANDSHAKE, 0, meta_bytes=1 << 20).pack() + bytes(16))
            stranger.sendall(bytes(100_000))
            assert stranger.recv(1) == b""


OTHER_USER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
stranger = socket.socket(socket.AF_UNIX); stranger.settimeout(5); stranger.connect("\\0" + sys.argv[1])
print(stranger.recv(1))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process needs root")
def test_another_user_is_not_listened_to(admitted: Any) -> None:
    command = [sys.executable, "-I", "-S", "-c", OTHER_USER, admitted(False)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.stdout == "b''\n", done.stderr


def test_a_stranger_that_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    host: Any = SimpleNamespace(name="/job:ps/task:0", poller=zeromq_sockets.poller(), tokens=Tokens())
    entrance = unix_listener.UnixListener(host)
    with socket.socket(socket.AF_UNIX) as early, socket.socket(socket.AF_UNIX) as late:
        early.connect("\0" + entrance.name)
        entrance.admit()
        later = time.monotonic() + 11
        monkeypatch.setattr(strangers.time, "monotonic", lambda: later)
        late.connect("\0" + entrance.name)
        entrance.admit()
        entrance.tick()
        early.settimeout(5)
        assert early.recv(1) == b""
        assert len(entrance.connections) == 1
        entrance.close()
        assert late.recv(1) == b""


NO_FILE_FOR_A_SOCKET = """
import json, os, resource, sys
import tfstyle_dist as td
server = td.Server(json.loads(sys.argv[1]), "ps", 0)
print("ready", flush=True)
input()
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    os.close(held.pop())  # the client's own connection takes one; then there is none for another socket
    print("full", flush=True)
server.join()
"""


@pytest.mark.parametrize("shared", ["1", "0"])
def test_a_server_without_a_file_for_a_socket_takes_messages_by_zeromq(
    shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", shared)
    cluster = {"ps": [f"127.0.0.1:{free_ports(1)[0]}"]}
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))" + NO_FILE_FOR_A_SOCKET
    server = subprocess.Popen(
        [sys.executable, "-c", limited, json.dumps(cluster)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    context = zeromq_sockets.Context(None)
    handshake = {"role": "coordinator", "task": "chief", "session": "s"}
    link = ServerLink(context, cluster["ps"][0], "/job:ps/task:0", handshake, timedelta(seconds=20))
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        server.stdin.write("\n")
        server.stdin.flush()
        assert server.stdout.readline() == "full\n"
        assert link.call({"method": "statistics"})["clients"] == 1
        assert link.transport_name.endswith("ZeroMQ")
    finally:
        link.close()
        server.kill()
        server.communicate(timeout=20)
        context.close()


def test_a_small_request_for_a_very_long_answer_is_refused(cluster: Any) -> None:
    """Before the server copies anything."""
    c = cluster(workers=1, ps=1, env={"TFSTYLE_SHARED_MEMORY": "0"})
    with c.strategy.scope():
        large, wide, count = td.Variable(torch.zeros(1 << 20)), td.Variable(torch.zeros(1, 1 << 20)), td.Variable(0.0)
    numbers = [v._tfstyle_record.shards[0].number for v in (large, wide, count)]
    write = Operation(Op.ADD, 0, numbers[2], 0, 0, 4)
    again = [Operation(Op.PULL, 0, numbers[0]) for _ in range(300)]
    rows = Operation(Op.PULL_ROWS, 0, numbers[1], 0, 300)
    raw = Raw(c.spec["ps"][0])
    raw.handshake(c.strategy.session)
    for operations, data in (([write, *again], bytes(16)), (again, b""), ([rows], bytes(8 * 300))):
        raw.batch(operations, data, flags=FLAG_INLINE if data else 0)
        kind, answer = raw.answer()
        assert kind is Kind.ERROR
        assert "is too long" in answer["message"]
    raw.batch([write, *again[:2]], struct.pack("<f3f", 1.0, 0.0, 0.0, 0.0), flags=FLAG_INLINE)
    assert Header.unpack(raw.socket.recv_multipart()[0]).kind is Kind.OK
    raw.close()
    assert float(count.value()) == 1.0  # the first write was not made


def test_garbage_on_the_ports_does_no_harm(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        value = td.Variable([1.0, 2.0])
    chance = random.Random(0)
    good = pack_message(Header(Kind.BATCH, 1, 5, 1, 1, 32, 16), pack_operations([Operation(Op.ADD, 0, 1, 0, 0, 8)]))
    for job in ("ps", "worker"):
        address = c.spec[job][0]
        for _ in range(60):
            raw = Raw(address)
            if chance.random() < 0.5 and job == "ps":
                raw.handshake(c.strategy.session)
            for _ in range(4):
                message = bytearray(good)
                for _ in range(chance.randrange(1, 6)):
                    message[chance.randrange(len(message))] = chance.randrange(256)
                size = chance.choice([0, 1, 47, 48, len(message), 3000])
                raw.send(bytes(message[:size]) or b"", *[chance.randbytes(9)] * chance.randrange(3))
            raw.close()
        host, port = address.split(":")
        for _ in range(10):
            with socket.create_connection((host, int(port))) as plain:
                plain.sendall(chance.randbytes(chance.randrange(1, 2000)))
    torch.manual_seed(0)
    assert c.coordinator.schedule(max, args=(1, 2)).get(timeout=30) == 2
    assert len(value.value()) == 2
    assert set(c.pids) == {("ps", 0), ("worker", 0)}


def has_open(pid: int, file: int) -> bool:
    """Whether a process has a file of this process open too."""
    wanted = os.fstat(file)
    for opened in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.path.samestat(opened.stat(), wanted):
                return True
    return False


def test_a_refused_segment_leaves_no_file_open(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    memory = os.memfd_create("tfstyle-ps-segment")
    assert has_open(os.getpid(), memory)
    try:
        os.ftruncate(memory, 4096)
        for half in (0, -1, -(1 << 62), -(1 << 70), 1 << 70, 1 << 62, 4096):
            raw = Raw(c.spec["ps"][0])  # of its own each time: what is no number for a size ends the link
            try:
                raw.handshake(c.strategy.session)
                place = {"process": os.getpid(), "file": memory, "name": "tfstyle-ps-segment", "half": half}
                meta = pack_json({"method": "segment", **place})
                raw.send(pack_message(Header(Kind.CALL, 1, meta_bytes=len(meta)), meta))
                kind, told = raw.answer()
                assert kind is Kind.ERROR, half
                assert told["error"] in ("PermissionError", "InvalidArgumentError"), told
                wait_until(lambda: not has_open(c.pids["ps", 0], memory))
            finally:
                raw.close()
    finally:
        os.close(memory)


SERVER_WITHOUT_SOCKETS = """
import errno, json, os, sys
import tfstyle_dist as td
from tfstyle_dist.parameter_server.transports.available import LISTENERS
def no_files(*args):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
LISTENERS.update(dict.fromkeys(LISTENERS, no_files))
td.Server(json.loads(sys.argv[1]), "ps", 0).join()
"""


@pytest.mark.parametrize("shared", ["1", "0"])
def test_a_server_that_cannot_open_another_socket_is_used_without(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", shared)
    c = cluster(workers=1, ps=1, start=False, coordinator=False, env={"TFSTYLE_SHARED_MEMORY": shared})
    server = subprocess.Popen([sys.executable, "-c", SERVER_WITHOUT_SOCKETS, json.dumps(c.spec)])
    try:
        c.start("worker", 0)
        c.make_coordinator()
        assert c.add_three_times(300_000).eq(3).all()
        assert "ZeroMQ" in c.strategy.servers.links[0].transport_name
        c.strategy.close()
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()


SMALL_SERVER = """
import json, sys
import tfstyle_dist as td
from tfstyle_dist.parameter_server.server import loop
loop.MOST_CLIENTS = 8
td.Server(json.loads(sys.argv[1]), "ps", 0).join()
"""


def test_clients_that_were_refused_take_no_room(cluster: Any) -> None:
    """Workers that wait for a coordinator ask many times; it must get in when it comes."""
    c = cluster(workers=1, ps=1, start=False, coordinator=False)
    server = subprocess.Popen([sys.executable, "-c", SMALL_SERVER, json.dumps(c.spec)])
    try:
        refused_clients(c)
    finally:
        server.kill()
        server.wait()


def refused_clients(c: Any) -> None:
    address = c.spec["ps"][0]

    def tries(count: int, session: str, role: str = "worker") -> None:
        for _ in range(count):
            raw = Raw(address)
            kind, told = raw.introduce(session, role)
            assert kind is (Kind.OK if role == "coordinator" else Kind.ERROR), told
            raw.close()

    tries(9, "abc")
    c.make_coordinator()
    tries(9, "abc")
    tries(9, c.strategy.session, "coordinator")  # a link that breaks again and again
    raw = Raw(address)
    raw.send(b"no message")
    assert raw.answer()[0] is Kind.ERROR
    raw.close()
    assert c.statistics()[0]["clients"] <= 3
    for number in range(9):
        raw = Raw(address)
        meta = pack_json({"role": "worker", "task": f"worker {number}", "session": c.strategy.session})
        raw.send(pack_message(Header(Kind.HANDSHAKE, 0, meta_bytes=len(meta)), meta))
        kind, told = raw.answer()
        raw.close()
    assert kind is Kind.ERROR
    assert "takes no more clients: it has 8" in told["message"]
