"""Whether a worker's process is gone: asked of its host, which may not answer."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest
from until import wait_until

from tfstyle_dist.elastic.connections.address_lookup import AddressLookup
from tfstyle_dist.elastic.connections.liveness import is_gone

ELSEWHERE = {"place": "another host", "pid": 1, "life": "a"}


def silent_address() -> tuple[socket.socket, list[socket.socket], tuple[str, int]]:
    """Where nobody answers, as at a host that has vanished: a listener whose queue is full."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = listener.getsockname()
    waiting = []
    for _ in range(8):
        waiting.append(socket.socket())
        waiting[-1].setblocking(False)
        waiting[-1].connect_ex(address)
    return listener, waiting, address


def test_nobody_waits_for_a_host_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that asks serves all connections: what it waits for here, all members wait for."""
    asked, plain = [], socket.socket.connect_ex

    def connect_ex(self: socket.socket, address: Any) -> int:
        asked.append(self.gettimeout())
        return plain(self, address)

    listener, waiting, address = silent_address()
    monkeypatch.setattr(socket.socket, "connect_ex", connect_ex)
    lookup = AddressLookup(address)
    for _ in range(50):
        assert not is_gone(ELSEWHERE, "here", False, lookup)
    assert set(asked) == {0.0}
    for one in waiting:
        one.close()
    listener.close()
    wait_until(lambda: is_gone(ELSEWHERE, "here", False, lookup))


def test_a_host_that_refuses_has_lost_the_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        lookup = AddressLookup(address)
        for _ in range(3):
            assert not is_gone(ELSEWHERE, "here", False, lookup)
    wait_until(lambda: is_gone(ELSEWHERE, "here", False, lookup))
    assert not is_gone(ELSEWHERE, "here", True, lookup), "a connection that was closed on purpose says nothing"


def test_what_was_answered_of_an_earlier_process_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the question and the look at the answer a new process may have begun to listen."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    lookup = AddressLookup(address)
    plain = socket.socket.connect_ex
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, to: plain(self, to) and errno.EINPROGRESS)
    assert not is_gone(ELSEWHERE, "here", False, lookup)  # refused, but nobody has looked yet
    with socket.create_server(address):
        monkeypatch.undo()
        for _ in range(3):
            assert not is_gone({**ELSEWHERE, "life": "b"}, "here", False, lookup)


def test_without_a_file_for_the_question_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is raised: the thread that asks would give up all connections."""

    def no_file(*_: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    lookup = AddressLookup(("127.0.0.1", 1))
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", no_file)
        assert not is_gone(ELSEWHERE, "here", False, lookup)
    wait_until(lambda: is_gone(ELSEWHERE, "here", False, lookup))
