"""Connections that forked children do not keep open, addresses that are looked up beside the work, and strangers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tfstyle_dist.core.logging import _said
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.elastic.connections import address_lookup, forks
from tfstyle_dist.elastic.connections.connection_loop import ConnectionLoop
from tfstyle_dist.elastic.connections.doorbell import Doorbell
from tfstyle_dist.elastic.connections.packets import MAGIC, PREFIX
from tfstyle_dist.elastic.options import Elastic

pytestmark = pytest.mark.timeout(120)


class _Sockets:
    def __init__(self, *sockets: socket.socket) -> None:
        self._sockets = sockets

    def sockets(self) -> tuple[socket.socket, ...]:
        return self._sockets


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_a_forked_child_does_not_hold_connections_open(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    holder = _Sockets(mine)
    forks.close_in_children(holder)
    end, wait = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(end, 1)  # lives on after the parent has closed its socket
        os._exit(0)
    mine.close()
    theirs.settimeout(60)
    assert theirs.recv(1) == b""
    os.write(wait, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(end)
    os.close(wait)


def test_a_slow_name_server_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, ask = threading.Event(), socket.getaddrinfo

    def slow(host: str, port: int, *rest: Any, **options: Any) -> Any:
        if options.get("flags"):
            return ask(host, port, *rest, **options)
        answer.wait(60)
        return ask("127.0.0.1", port, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    asked = address_lookup.AddressLookup(("worker-1.example", 80))
    assert asked.found() is None
    assert asked.found() is None
    answer.set()
    assert asked._thread is not None
    asked._thread.join()
    found = asked.found()
    assert found is not None
    assert found[4] == ("127.0.0.1", 80)
    assert address_lookup.AddressLookup(("127.0.0.1", 80)).found() is not None


def written(header: Any, body: int = 0) -> bytes:
    text = json.dumps(header).encode()
    return PREFIX.pack(MAGIC, len(text), body) + text


@pytest.fixture
def loop() -> Iterator[tuple[ConnectionLoop, tuple[str, int], threading.Event]]:
    """The connections of worker 0, its address, and whether worker 1 has come."""
    came = threading.Event()
    addresses = [("127.0.0.1", port) for port in free_ports(2, "127.0.0.1")]

    def nothing(*_: Any) -> None:
        """Nobody sends or goes."""

    made = ConnectionLoop(0, addresses, "job", Elastic(2), Doorbell(0), lambda _: came.set(), nothing, nothing)
    made.start()
    yield made, addresses[0], came
    made.close()


def hello(rank: Any, job: Any = "job") -> bytes:
    return written([{"is": "hello", "job": job, "rank": rank, "life": "a"}, []])


HELLO, DEEP = hello(1), b"[" * 700 + b"]" * 700


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        written([[], []]),
        written([5, []]),
        written([{"is": "x"}, [[5, [1]]]]),
        written([{"is": "x"}, []], body=1 << 62),
        written([{"is": "x"}, []], body=(1 << 64) - 1),
        written([{"is": "x" * 100_000}, []]),
        hello(True),
        hello(0),
        hello(2),
        hello([1]),
        hello(json.loads(DEEP)),
    ],
)
def test_a_stranger_is_sent_away_and_the_others_are_let_in(
    loop: tuple[ConnectionLoop, tuple[str, int], threading.Event], sent: bytes
) -> None:
    _, address, came = loop
    with socket.create_connection(address, 30) as stranger, socket.create_connection(address, 30) as worker:
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        worker.sendall(HELLO)
        assert came.wait(30)


def test_of_all_strangers_one_line_is_logged(
    loop: tuple[ConnectionLoop, tuple[str, int], threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    _said.difference_update(("elastic: a stranger", "elastic: refused"))
    for sent in (written([{"is": "x"}, [["y" * 9000, [1]]]]), hello(1, "z" * 9000)) * 3:
        with socket.create_connection(loop[1], 30) as stranger:
            stranger.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    nonsense, other_job = [record.getMessage() for record in caplog.records]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert nonsense.startswith("A connection from 127.0.0.1:")
    assert other_job.startswith("Worker 1 of job 'zzz")
    assert max(len(nonsense), len(other_job)) < 400


def test_strangers_that_say_nothing_do_not_take_all_files(
    loop: tuple[ConnectionLoop, tuple[str, int], threading.Event],
) -> None:
    made, address, came = loop
    with contextlib.ExitStack() as opened:
        strangers = [opened.enter_context(socket.create_connection(address, 30)) for _ in range(200)]
        assert strangers[0].recv(1) == b""
        opened.enter_context(socket.create_connection(address, 30)).sendall(HELLO)
        assert came.wait(30)
        assert len(made.sockets()) < 150


def test_a_stranger_that_says_nothing_is_sent_away_in_time(
    loop: tuple[ConnectionLoop, tuple[str, int], threading.Event],
) -> None:
    made, address, came = loop
    with socket.create_connection(address, 30) as worker, contextlib.ExitStack() as opened:
        worker.sendall(HELLO)
        assert came.wait(30)
        made._open.strangers._seconds = 0.5
        stranger = opened.enter_context(socket.create_connection(address, 30))
        assert stranger.recv(1) == b""
        assert made.known() == [1]
