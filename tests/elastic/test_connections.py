"""Connections that forked children do not keep open, and addresses that are looked up beside the work."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tfstyle_dist.elastic import forks, lookup

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
    asked = lookup.Lookup(("worker-1.example", 80))
    assert asked.found() is None
    assert asked.found() is None
    answer.set()
    assert asked._thread is not None
    asked._thread.join()
    found = asked.found()
    assert found is not None
    assert found[4] == ("127.0.0.1", 80)
    assert lookup.Lookup(("127.0.0.1", 80)).found() is not None
